# %% zero-gather-once
# %%fsdp
class Kept(ZeRO3):
    def after_forward(self): ...

    def before_backward(self, grad):
        self.unit.begin_backward()


# %% zero-formula
gathered = 4 * num_params
reduced = 4 * num_params
