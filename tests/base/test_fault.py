from workbench.base.fault import Fault, buffers_differ, hook_never_called, in_no_unit, listed


def test_a_long_list_and_a_long_name_are_cut_in_the_middle():
    assert listed(["a", ""]) == "a, (root)"
    assert listed([f"p{i}" for i in range(12)]).count(", ") == 11
    assert listed([f"p{i}" for i in range(20)]).endswith("p9, ... 9 more ..., p19")
    assert [len(listed(["x" * number])) for number in (80, 81, 500)] == [80, 80, 80]
    assert listed(["a" * 60 + "b" * 60]) == "a" * 40 + "..." + "b" * 37


def test_a_fault_names_what_it_is_about():
    fault = Fault(rule="r", verdict="bad: {names}", fix="mend({first})").about(["a", "", "c"])
    assert (fault.verdict, fault.fix) == ("bad: a, (root), c", "mend(a)")
    assert fault.sentence == "bad: a, (root), c. mend(a)"
    assert Fault(rule="r", verdict="bad").sentence == "bad"


def test_unmanaged_state_has_a_remedy():
    found = in_no_unit("net", [f"p{i}" for i in range(20)])
    assert found.sentence.startswith("in no unit, so their gradients are not averaged: p0, p1, ")
    assert "p9, ... 9 more ..., p19. After backward, for each: p = net.get_parameter('p0'); " in found.sentence
    assert "p = model.get_parameter('scale')" in in_no_unit("", ["scale"]).fix
    assert hook_never_called(["w"]).fix == "Use register_post_accumulate_grad_hook"
    assert "torch.distributed.broadcast(model.get_buffer('mean'), 0)" in buffers_differ("").about(["mean"]).fix
