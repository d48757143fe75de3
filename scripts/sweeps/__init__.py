# SPDX-License-Identifier: Apache-2.0
"""Many runs of one run file: a grid over its bindings."""
