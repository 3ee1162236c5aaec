"""Plans that use the tier below the device.

`tier.py` describes the tier, `limits.py` makes it of what people set, `offloader.py` says what may go there.
`sources.py` says who is asked for plans: `offmate/` (O-ILP), `streaming.py` (the fixed policy), `sweep/` (Belady).
`insertion.py` puts copies among computations, `hiding/` hides them, `homes.py` chooses between host and disk,
`cpu_updates.py` times updates.
"""
