// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Commands for memory: keys, memory on the device, and memory of programs that use DevX.

mod memic;
mod mkey;
pub(super) mod umem;

use super::Handler;

/// Returns the handler of a command for memory.
pub(super) fn handler(opcode: u16) -> Option<Handler> {
    [mkey::handler, memic::handler, umem::handler]
        .iter()
        .find_map(|family| family(opcode))
}
