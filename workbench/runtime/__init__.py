"""Execution of requests on a rank: commands, recording, recovery. Runs in the engine processes; knows no views."""
