"""REQUESTS TO A STARTED CLUSTER: sending, waiting, pausing, recovery after failures, and the reports."""
