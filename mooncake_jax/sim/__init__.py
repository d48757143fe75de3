# SPDX-License-Identifier: Apache-2.0
"""The cluster's physics in virtual time."""
