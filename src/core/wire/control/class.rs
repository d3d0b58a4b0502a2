// SPDX-License-Identifier: GPL-2.0

//! Classes of control requests that are sent or executed in another way.

use super::ControlRequest;
use crate::wire::FEATURE_RENAME;

impl ControlRequest<'_> {
    /// Returns the optional features that the receiver must have. To a receiver without them, the request is
    /// malformed.
    pub fn required_features(&self) -> u64 {
        match self {
            Self::RenameRegion { .. } => FEATURE_RENAME,
            _ => 0,
        }
    }

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
