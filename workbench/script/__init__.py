"""The program of a notebook as a script that torchrun starts."""
