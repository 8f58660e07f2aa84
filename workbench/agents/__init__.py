"""Programs and agents: the commands of ``%fsdp`` as tools of the Model Context Protocol, and a skill to read first."""
