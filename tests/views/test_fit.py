"""The picture of a search: each policy once, by whether it fits, with the line to type."""

from workbench.events import Category
from workbench.protocol.planning import PlannedPolicy
from workbench.views.fit import fit

GIB = 2**30


def policy(options, gib, milliseconds, **more):
    return PlannedPolicy(
        options=options,
        line=f"workbench plan {options} a<b.py",
        num_ranks=8,
        peak_bytes=gib * GIB,
        peak_bytes_by_category={Category.ACTIVATIONS: gib * GIB, Category.SNAPSHOTS: 0},
        step_ns=milliseconds * 10**6,
        **more,
    )


def test_policies_are_drawn_by_whether_they_fit():
    policies = [
        policy("", 90, 10, fits=False),
        policy("--checkpoint Block", 40, 14, fits=True, is_best=True),
        policy("--mesh hosts", 60, 12, fits=True, is_best=True),
        policy("--offload", 50, 30, fits=True),
    ]
    fig = fit(policies, 80 * GIB, "what fits")
    line, *groups = fig.data
    assert (list(line.x), list(line.y)) == ([12, 14], [60, 40])
    drawn = {group.name: (list(group.x), list(group.y)) for group in groups}
    assert drawn == {
        "fits, and none is better": ([14, 12], [40, 60]),
        "fits": ([30], [50]),
        "does not fit": ([10], [90]),
    }
    assert groups[-1].hovertext[0].split("<br>") == [
        "<b>as it is</b>",
        "90.0 GiB at the peak, 10.0 ms a step",
        "activations: 90.0 GiB",
        "workbench plan  a&lt;b.py",
    ]
    assert fig.layout.shapes[0].y0 == 80


def test_the_axis_says_what_is_known_of_times():
    policies = [policy("", 40, 14, fits=True, is_best=True)]
    titles = [fit(policies, 80 * GIB, "", error).layout.xaxis.title.text for error in ("", "off by up to 3%")]
    assert titles == ["step, at least [ms]", "step, off by up to 3% [ms]"]
