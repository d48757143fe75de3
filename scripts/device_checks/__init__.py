# SPDX-License-Identifier: Apache-2.0
"""Parts of `scripts/device_check.py`, a file each.

They import the library and nothing of `scripts` that needs gin or grain: the
images that the check runs on have neither.
"""
