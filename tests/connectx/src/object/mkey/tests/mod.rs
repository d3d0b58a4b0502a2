// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of memory keys.

mod model;
mod permission;
mod table;

use super::*;

const PD: u32 = 3;
const QP: u32 = 0x41;

fn user(access: Access) -> User {
    User {
        pd: PD,
        qp: QP,
        access,
    }
}

/// Returns a key with all rights and this table.
fn key(mode: u32, start: u64, len: u64, table: Vec<u8>) -> Mkey {
    let mut context = [0; size!(mkc)];
    set!(context, mkc, access_mode_1_0, mode & 3);
    set!(context, mkc, access_mode_4_2, mode >> 2);
    set!(context, mkc, lr, 1u32);
    set!(context, mkc, lw, 1u32);
    set!(context, mkc, rr, 1u32);
    set!(context, mkc, rw, 1u32);
    set!(context, mkc, a, 1u32);
    set!(context, mkc, pd, PD);
    set!(context, mkc, qpn, 0xff_ffffu32);
    set!(context, mkc, mkey_7_0, 7u32);
    set!(context, mkc, start_addr, start);
    set!(context, mkc, len, len);
    set!(context, mkc, log_page_size, 12u32);
    let mode = Mode::of(&context).unwrap();
    Mkey::new(context, mode, table)
}

fn pages(addresses: &[u64]) -> Vec<u8> {
    let entries = addresses.iter().map(|address| address | PRESENT);
    entries.flat_map(u64::to_be_bytes).collect()
}

fn klm(length: u32, key: u32, address: u64) -> Vec<u8> {
    let words = [length.to_be_bytes(), key.to_be_bytes()].concat();
    [words, address.to_be_bytes().to_vec()].concat()
}

fn new_keys() -> Table<Mkey> {
    Table::new(FIRST, 1000)
}

/// Adds a key. Returns its number, variant included.
fn add(keys: &mut Table<Mkey>, mkey: Mkey) -> u32 {
    (keys.insert(mkey).unwrap() << 8) | 7
}

fn look(
    keys: &Table<Mkey>,
    key: u32,
    access: Access,
    address: u64,
    length: u64,
) -> Result<Vec<Piece>, MkeyFault> {
    translate(keys, key, user(access), address, length, &mut |_, _| ())
}

/// Returns the guest address of each byte.
fn bytes(pieces: &[Piece]) -> Vec<u64> {
    let at = |piece: &Piece| match piece.place {
        Place::Guest(at) => at..at + piece.length,
        other => panic!("{other:?} in the guest's memory"),
    };
    pieces.iter().flat_map(at).collect()
}
