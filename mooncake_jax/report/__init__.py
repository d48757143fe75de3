# SPDX-License-Identifier: Apache-2.0
"""What is left of a run: results folder, timeline, page, table."""
