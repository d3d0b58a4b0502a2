// SPDX-License-Identifier: GPL-2.0

//! Classes of control requests that are executed in another way.

use super::ControlRequest;

impl ControlRequest<'_> {
    /// Returns `true` if the receiver needs long for the reply, since it clears memory first.
    pub fn is_long(&self) -> bool {
        matches!(self, Self::AllocLoan { .. })
    }

    /// Returns `true` if the request reverts the effect of another request.
    pub fn is_undo(&self) -> bool {
        matches!(
            self,
            Self::ReleaseLoan { .. }
                | Self::ShrinkLoan { .. }
                | Self::UnregisterName { .. }
                | Self::UnmapRegion { .. }
                | Self::FreeRegion { .. }
                | Self::DetachRing { .. }
        )
    }
}
