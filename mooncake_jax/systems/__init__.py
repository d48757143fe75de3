# SPDX-License-Identifier: Apache-2.0
"""Other systems, to compare with under the same workload and costs."""
