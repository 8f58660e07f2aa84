"""Traces of files that other tools wrote: profiles of ``torch.profiler``, and dumps of c10d's Flight Recorder."""
