# SPDX-License-Identifier: Apache-2.0
"""Is Mooncake worth it for a workload: reuse, break-even, verdict."""
