# SPDX-License-Identifier: Apache-2.0
"""DeviceBackend: works on JAX devices, on the wall clock.

Read `device.py` (the loop thread's side), `instance.py` (who owns what),
`owner.py` and `decode_run.py` (what runs on the devices, in which order),
`routes.py` and `far_routes.py` (the ways of a transfer).
"""
