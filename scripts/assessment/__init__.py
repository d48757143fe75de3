# SPDX-License-Identifier: Apache-2.0
"""Is Mooncake worth it for a trace: what scripts/assess.py consists of."""
