"""WHAT A RANK DOES WHEN ASKED: commands, recording, recovery. Runs in the engine processes; knows no pictures."""
