// Made of workbench/live/messages.py by: python -m tests.helpers.example_answers
// One example of each answer to a panel, as the kernel sends it.
import type { AnswerOf } from "../src/client";
import type { PanelAnswer } from "../src/protocol";

export const ANSWERS = {
  "welcome": {
    "word": "welcome",
    "number": 1,
    "version": 3,
    "workbench": "0.2.0",
    "dashboard": {
      "buttons": [
        "step"
      ],
      "panels": [
        "ranks"
      ],
      "sizes": [
        "unit"
      ],
      "faults": [
        "random"
      ]
    },
    "problem": ""
  },
  "state": {
    "word": "state",
    "number": 2,
    "cluster": {
      "is_running": true,
      "exchange": "",
      "waits_for": "",
      "num_ranks": 2,
      "device": "cpu",
      "profile": "",
      "host": "here",
      "kernel_pid": 1,
      "outlives": false,
      "held_by": "",
      "is_free": false,
      "one_job": "",
      "cores": 2
    },
    "ranks": [
      {
        "rank": 0,
        "health": "running",
        "where": "forward of blocks.0, step 11",
        "host": "here",
        "device": "cpu",
        "pid": 100,
        "num_bytes": [
          1024,
          2048,
          3072,
          4096,
          5120,
          6144,
          7168,
          8192,
          9216,
          10240
        ],
        "in_use": 56320,
        "peak_bytes": 112640,
        "peak_bytes_by_class": [
          2048,
          4096,
          6144,
          8192,
          10240,
          12288,
          14336,
          16384,
          18432,
          20480
        ],
        "peak": "backward of blocks.0, step 10"
      },
      {
        "rank": 1,
        "health": "running",
        "where": "forward of blocks.0, step 11",
        "host": "here",
        "device": "cpu",
        "pid": 101,
        "num_bytes": [
          1024,
          2048,
          3072,
          4096,
          5120,
          6144,
          7168,
          8192,
          9216,
          10240
        ],
        "in_use": 56320,
        "peak_bytes": 112640,
        "peak_bytes_by_class": [
          2048,
          4096,
          6144,
          8192,
          10240,
          12288,
          14336,
          16384,
          18432,
          20480
        ],
        "peak": "backward of blocks.0, step 10"
      }
    ],
    "clocks": [
      {
        "ranks": [
          1
        ],
        "error_ns": 40000,
        "text": "its clock is 5.00 ms behind rank 0's, \u00b1 40.0 \u00b5s"
      }
    ],
    "units": [
      {
        "index": 0,
        "name": "(root)",
        "root": 0,
        "num_params": 2,
        "is_flat": true,
        "bytes_unsharded": 4096,
        "bytes_at_rest": 2048,
        "bytes_padding": 0,
        "shard_size": 2,
        "replicate_size": 1,
        "reshard_after_forward": "true",
        "compute_dtype": "float32",
        "reduce_dtype": "float32",
        "offload": false
      },
      {
        "index": 1,
        "name": "blocks.0",
        "root": 0,
        "num_params": 2,
        "is_flat": false,
        "bytes_unsharded": 4096,
        "bytes_at_rest": 2048,
        "bytes_padding": 0,
        "shard_size": 2,
        "replicate_size": 1,
        "reshard_after_forward": "true",
        "compute_dtype": "float32",
        "reduce_dtype": "float32",
        "offload": false
      }
    ],
    "unit_states": [
      {
        "ranks": [
          0,
          1
        ],
        "states": "02"
      }
    ],
    "breakpoints": [
      {
        "id": 1,
        "text": "all_gather:blocks.0 --rank 1",
        "is_on": true
      }
    ],
    "request": {
      "line": "%fsdp step 40",
      "is_stopped": false,
      "stop": "",
      "reasons": [],
      "in_background": true,
      "steps_done": 11,
      "steps_total": 40
    },
    "training": {
      "step": 11,
      "loss": 2.30259,
      "loss_step": 11,
      "steps_per_s": 3.14159,
      "tokens_per_s": null
    },
    "ended": {
      "count": 1,
      "line": "a cell",
      "text": "",
      "is_error": false
    },
    "output": 3,
    "is_recorded": true,
    "record": "",
    "said": "",
    "fault": ""
  },
  "models": {
    "word": "models",
    "number": 3,
    "models": [
      {
        "name": "model",
        "class_name": "GPT",
        "is_sharded": true,
        "num_params": 10,
        "num_elements": 100,
        "num_bytes": 400,
        "classes": [
          {
            "name": "Block",
            "count": 4,
            "num_elements": 80
          }
        ],
        "suggested": [
          "Block"
        ],
        "policy": {
          "api": "fully_shard",
          "strategy": "hybrid",
          "orig_params": false,
          "wrap": [
            "Block"
          ],
          "mesh": "2x2",
          "reshard_after_forward": 2,
          "mp": "bf16,reduce=fp32",
          "offload": true,
          "prefetch": 2
        },
        "units": [
          0,
          1
        ],
        "never_cleared": [],
        "has_optimizer": false,
        "ranks": [
          0,
          1
        ]
      }
    ],
    "has_step": false,
    "text": ""
  },
  "preview": {
    "word": "preview",
    "number": 4,
    "line": "%fsdp shard model",
    "problem": "",
    "units": [
      "(root)",
      "blocks.0"
    ],
    "bytes_unsharded": 8192,
    "bytes_ignored": 0,
    "at_rest": [
      {
        "params": 4096,
        "grads": 4096,
        "adam": 8192,
        "ranks": [
          0,
          1
        ]
      }
    ],
    "sent": [
      {
        "kind": "all-gather",
        "num_ranks": 2,
        "calls": 3,
        "num_bytes": 8192,
        "sent_bytes": 4096
      }
    ],
    "sent_bytes": 4096
  },
  "params": {
    "word": "params",
    "number": 5,
    "unit": 1,
    "params": [
      {
        "fqn": "blocks.0.weight",
        "shape": [
          32,
          16
        ],
        "dtype": "float32",
        "bytes_unsharded": 2048,
        "bytes_at_rest": 1024,
        "rows_per_rank": [
          16,
          16
        ],
        "is_trainable": true,
        "flat": ""
      }
    ]
  },
  "line": {
    "word": "line",
    "number": 6,
    "line": "%fsdp step 3"
  },
  "said": {
    "word": "said",
    "number": 7,
    "line": "%fsdp step 3",
    "text": "3 steps, loss 2.1",
    "is_error": false,
    "data": {}
  },
  "recalled": {
    "word": "recalled",
    "number": 8,
    "commands": [
      {
        "line": "%fsdp start",
        "source": "panel",
        "t_s": 1.5,
        "failed": false
      }
    ]
  },
  "lines": {
    "word": "lines",
    "number": 9,
    "lines": [
      {
        "ranks": [
          0,
          1
        ],
        "kind": "stdout",
        "text": "loss 2.5",
        "step": 11,
        "t_s": 1.5
      }
    ],
    "is_cut": false
  },
  "refused": {
    "word": "refused",
    "number": 9,
    "text": "No such question.",
    "view": ""
  }
} as const satisfies { readonly [W in PanelAnswer["word"]]: AnswerOf<W> };
