# SPDX-License-Identifier: Apache-2.0
"""What clients speak to."""
