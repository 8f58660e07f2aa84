// Made of workbench/live/packing.py, workbench/events.py and workbench/replay/grouping.py by: python -m workbench.cli.generate_front_end

export const TABLES = {
  spans: {"start": ["f8", 1], "duration": ["f4", 1], "bytes": ["f4", 1], "before": ["f4", 1], "unit": ["i2", 1], "track": ["u1", 1], "kind": ["u1", 1], "exposed": ["u1", 1]},
  memory: {"t": ["f8", 1], "bytes": ["f4", 10], "group": ["u1", 1]},
  states: {"t": ["f8", 1], "unit": ["i2", 1], "group": ["u1", 1], "state": ["u1", 1]},
  steps: {"t": ["f8", 1], "step": ["i4", 1], "loss": ["f4", 1], "has_loss": ["u1", 1], "ms": ["f4", 1], "exposed": ["f4", 1], "model": ["i4", 1]},
};

export const TRACKS = ["compute", "all-gather", "reduce-scatter", "other", "wait"];

export const MAX_RUNS = 8;
export const NAMED_RUNS = 3;
