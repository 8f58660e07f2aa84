# %% tour-counts
all_gathers = 2 * 5 - 1
reduce_scatters = 5

# %% tour-payload
gathered = 2 * 198_272 * 4
