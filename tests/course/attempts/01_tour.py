# %% tour-counts: right
all_gathers, reduce_scatters = 9, 5

# %% tour-counts: right
reduce_scatters = 4 + 1
all_gathers = 2 * reduce_scatters - 1

# %% tour-counts: right
all_gathers, reduce_scatters = 9.0, 5.0

# %% tour-counts: you answered 10 all-gathers, which is not what a rank issued in step 30; your answer for the reduce-scatters is right
all_gathers, reduce_scatters = 10, 5

# %% tour-counts: you answered 5 all-gathers, which is not
all_gathers, reduce_scatters = 5, 5

# %% tour-counts: you answered 8 all-gathers and 4 reduce-scatters
all_gathers, reduce_scatters = 8, 4

# %% tour-counts: you answered 9 reduce-scatters
all_gathers, reduce_scatters = 9, 9

# %% tour-counts: you answered 18 all-gathers and 10 reduce-scatters
all_gathers, reduce_scatters = 2 * 9, 2 * 5

# %% tour-counts: the number of all-gathers: '9' is a str
all_gathers, reduce_scatters = "9", "5"

# %% tour-counts: the number of reduce-scatters: there is no answer yet
all_gathers, reduce_scatters = 9, None

# %% tour-counts: the number of all-gathers: True is a bool
all_gathers, reduce_scatters = True, 5

# %% tour-payload: right
gathered = 2 * 4 * 198_272

# %% tour-payload: right
gathered = sum(198_272 * 4 for _ in ("forward", "backward"))

# %% tour-payload: right
gathered = 1_586_176.0

# %% tour-payload: you answered 793,088 B in all-gathers of blocks.1, which is not what a rank issued in step 30: look at how often
gathered = 198_272 * 4

# %% tour-payload: you answered 396,544 B
gathered = 2 * 198_272

# %% tour-payload: you answered 1,586,176,000 B
gathered = 2 * 4 * 198_272 * 1000

# %% tour-payload: you answered 2,379,264 B
gathered = 3 * 4 * 198_272

# %% tour-payload: you answered 1,549 B
gathered = 2 * 4 * 198_272 // 1024

# %% tour-payload: you answered 3,172,352 B
gathered = 2 * 8 * 198_272

# %% tour-payload: the bytes in all-gathers of blocks.1: 774.5 is a float
gathered = 198_272 * 4 / 1024

# %% tour-payload: the bytes in all-gathers of blocks.1: there is no answer yet
gathered = None
