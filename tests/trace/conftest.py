from hypothesis import HealthCheck, settings

# time is no law here: machines are shared
settings.register_profile("laws", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laws")
