"""A profile as torch.profiler writes it on GPUs with NCCL, made by hand from the source of torch and Kineto."""

import json

_ARGS = {
    "dtype": "BFloat16",
    "Group size": 2,
    "Process Group Name": "1",
    "Process Group Description": "mesh_dp",
    "Process Group Ranks": "[0, 1]",
}


def nccl_profile(folder):
    """Write the profiles of two ranks, one step of a unit ``layers.0``, and return their paths."""
    paths = []
    for rank in (0, 1):
        path = folder / f"host_{rank}.pt.trace.json"
        info = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_count": 2}
        content = {
            "schemaVersion": 1,
            "distributedInfo": info,
            "host_name": "node1",
            "baseTimeNanoseconds": 1_790_857_026_000_000_000,
            "traceEvents": _events(rank),
        }
        path.write_text(json.dumps(content))
        paths.append(path)
    return paths


def _events(rank):
    def host(name, ts, dur, cat="user_annotation", **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": 100 + rank, "tid": 7, "ts": ts, "dur": dur, "args": args}

    def launch(ts, correlation):
        args = {"External id": correlation, "cbid": 211, "correlation": correlation}
        return host("cudaLaunchKernel", ts, 2, "cuda_runtime", **args)

    def kernel(name, ts, dur, stream, correlation, **args):
        told = {"device": rank, "stream": stream, "correlation": correlation, **args}
        one = {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": stream, "ts": ts, "dur": dur}
        return {**one, "args": told}

    gather = {**_ARGS, "Collective name": "_allgather_base", "In msg nelems": 2048, "Out msg nelems": 4096, "Seq": 17}
    reduce = {**_ARGS, "Collective name": "_reduce_scatter_base", "In msg nelems": 4096, "Out msg nelems": 2048}
    reduce["Seq"] = 18
    unit = "layers.0"
    return [
        host("ProfilerStep#5", 90, 400),
        host(f"FSDP::pre_forward ({unit})", 100, 50),
        host(f"FSDP::all_gather ({unit})", 101, 20),
        host("c10d::_allgather_base_", 110, 8, "cpu_op"),
        host("record_param_comms", 112, 4, "cpu_op", **gather),
        launch(113, 1),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 120, 60, 20, 1, **gather),
        host(f"FSDP::all_gather_copy_out ({unit})", 130, 10),
        launch(132, 2),
        kernel("split_with_sizes_copy_out", 182, 5, 7, 2),
        launch(155, 3),
        kernel("ampere_bf16_gemm", 190, 100, 7, 3),
        host(f"FSDP::post_forward ({unit})", 160, 5),
        host(f"FSDP::pre_backward ({unit})", 170, 5),
        launch(178, 4),
        kernel("ampere_bf16_gemm", 291, 100, 7, 4),
        host(f"FSDP::post_backward_accumulate ({unit})", 200, 2),
        host(f"FSDP::post_backward_reshard ({unit})", 203, 2),
        host(f"FSDP::post_backward_reduce ({unit})", 206, 20),
        host("c10d::_reduce_scatter_base_", 212, 8, "cpu_op"),
        host("record_param_comms", 213, 4, "cpu_op", **reduce),
        launch(214, 5),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 395, 40, 21, 5),
        host("Optimizer.step#AdamW.step", 240, 30),
        launch(250, 6),
        kernel("multi_tensor_apply_kernel", 440, 20, 7, 6),
    ]
