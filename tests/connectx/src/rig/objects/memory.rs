// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Memory with a key.

use super::*;
use crate::layout::{at, get, set, size};

/// Rights of a key, as bits.
pub(crate) mod rights {
    pub(crate) const LOCAL_READ: u32 = 1;
    pub(crate) const REMOTE_READ: u32 = 4;
    pub(crate) const REMOTE_WRITE: u32 = 8;
    pub(crate) const ATOMIC: u32 = 16;
    pub(crate) const ALL: u32 = 31;
}

/// Memory with a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mr {
    pub(crate) node: usize,
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// Attributes of a memory key to create.
#[derive(Clone, Copy, Debug)]
struct Key {
    address: u64,
    length: u64,
    /// Log2 of the page size in bytes.
    log_page: u32,
    pd: u32,
    rights: u32,
}

impl Rig {
    /// Creates memory with all rights.
    pub(crate) fn mr(&mut self, node: usize, length: u64) -> Mr {
        let pd = self.nodes[node].pd;
        self.mr_with(node, length, pd, rights::ALL)
    }

    /// Creates memory in a protection domain, with these rights.
    pub(crate) fn mr_with(&mut self, node: usize, length: u64, pd: u32, rights: u32) -> Mr {
        let address = self.allocate(node, length);
        let table = pages(address, length);
        let key = Key {
            address,
            length,
            log_page: 12,
            pd,
            rights,
        };
        self.key(node, &key, &table)
    }

    /// Creates memory in which one page of `1 << log_page` bytes is mapped `count` times.
    pub(crate) fn mr_repeated(&mut self, node: usize, log_page: u32, count: u64) -> Mr {
        let page = 1 << log_page;
        let piece = self.allocate(node, 2 * page).next_multiple_of(page);
        let key = Key {
            address: piece,
            length: count << log_page,
            log_page,
            pd: self.nodes[node].pd,
            rights: rights::ALL,
        };
        let table = (piece | 3).to_be_bytes().repeat(count as usize);
        self.key(node, &key, &table)
    }

    /// Creates a key to the pages of `table`.
    fn key(&mut self, node: usize, key: &Key, table: &[u8]) -> Mr {
        const VARIANT: u32 = 0x5a;
        let units = (table.len() as u32).div_ceil(16);
        let mut input = vec![0; size!(create_mkey_in)];
        set!(input, create_mkey_in, opcode, MLX5_CMD_OP_CREATE_MKEY);
        set!(
            input,
            create_mkey_in,
            translations_octword_actual_size,
            units
        );
        let mut context = [0; size!(mkc)];
        set!(context, mkc, access_mode_1_0, 1u32);
        set!(context, mkc, lr, key.rights & 1);
        set!(context, mkc, lw, (key.rights >> 1) & 1);
        set!(context, mkc, rr, (key.rights >> 2) & 1);
        set!(context, mkc, rw, (key.rights >> 3) & 1);
        set!(context, mkc, a, (key.rights >> 4) & 1);
        set!(context, mkc, umr_en, 1u32);
        set!(context, mkc, en_rinval, 1u32);
        set!(context, mkc, qpn, 0xff_ffffu32);
        set!(context, mkc, mkey_7_0, VARIANT);
        set!(context, mkc, pd, key.pd);
        set!(context, mkc, start_addr, key.address);
        set!(context, mkc, len, key.length);
        set!(context, mkc, translations_octword_size, units);
        set!(context, mkc, log_page_size, key.log_page);
        let at = at!(create_mkey_in, memory_key_mkey_entry);
        input[at..at + context.len()].copy_from_slice(&context);
        input.extend(table);
        input.resize(size!(create_mkey_in) + units as usize * 16, 0);
        let output = self.command(node, &input, size!(create_mkey_out)).unwrap();
        Mr {
            node,
            address: key.address,
            key: (get!(output, create_mkey_out, mkey_index) << 8) | VARIANT,
        }
    }
}
