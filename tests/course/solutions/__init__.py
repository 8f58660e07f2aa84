"""An FSDP behind the adapters of CS336, and ten typical wrong ones, each with one fault."""
