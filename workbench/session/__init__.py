"""WHAT A STARTED CLUSTER IS ASKED: requests from sending to settled, what went wrong, and the answer in words."""
