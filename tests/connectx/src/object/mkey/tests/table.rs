// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Walks over translation tables: order and number of the entries read, and changed tables.

use super::translation::DEPTH;
use super::*;

#[test]
fn cyclic_keys_return_depth_fault() {
    let mut keys = new_keys();
    let own = (FIRST << 8) | 7;
    let number = add(&mut keys, key(2, 0, 4096, klm(4096, own, 0)));
    assert_eq!(number, own);
    assert_eq!(
        look(&keys, number, Access::LocalRead, 0, 8),
        Err(MkeyFault::Depth)
    );
}

#[test]
fn physical_memic_and_null_keys_translate() {
    let mut keys = new_keys();
    let mut physical = key(0, 0, 0, Vec::new());
    set!(physical.context, mkc, length64, 1u32);
    let physical = add(&mut keys, physical);
    let piece = |place| Ok(vec![Piece { place, length: 8 }]);
    assert_eq!(
        look(&keys, physical, Access::LocalRead, 0x1234, 8),
        piece(Place::Guest(0x1234))
    );
    let device = add(&mut keys, key(5, memic::BAR_OFFSET + 64, 32, Vec::new()));
    assert_eq!(
        look(&keys, device, Access::LocalRead, 16, 8),
        piece(Place::Memic(80))
    );
    assert_eq!(
        look(&keys, device, Access::LocalRead, 28, 8),
        Err(MkeyFault::Range)
    );
    assert_eq!(
        look(&keys, NULL, Access::LocalRead, 0, 8),
        piece(Place::Null)
    );
}

#[test]
fn each_entry_read_is_reported() {
    let mut keys = new_keys();
    let number = add(
        &mut keys,
        key(1, 0, 3 * 4096, pages(&[0x1000, 0x9000, 0x5000])),
    );
    let mut entries = Vec::new();
    let mut tell = |key, entry| entries.push((key, entry));
    translate(
        &keys,
        number,
        user(Access::LocalRead),
        4000,
        4200,
        &mut tell,
    )
    .unwrap();
    assert_eq!(
        entries,
        [(number >> 8, 0), (number >> 8, 1), (number >> 8, 2)]
    );
}

#[test]
fn empty_ranges_are_skipped() {
    const EMPTY: usize = 1000;
    let mut keys = new_keys();
    let mut number = add(&mut keys, key(1, 0, 4096, pages(&[0x1000])));
    for _ in 1..DEPTH {
        let empty = klm(0, number, 0).repeat(EMPTY);
        let halves = [klm(2048, number, 0), empty.clone(), klm(2048, number, 2048)];
        let table = [empty, halves.concat()].concat();
        number = add(&mut keys, key(2, 0, 4096, table));
    }
    let mut count = 0;
    let mut tell = |_, _| count += 1;
    let found = translate(&keys, number, user(Access::LocalRead), 2040, 16, &mut tell);
    assert_eq!(found.map(|pieces| bytes(&pieces)[0]), Ok(0x1000 + 2040));
    // Two parts, with one entry each at each key.
    assert_eq!(count, 2 * DEPTH);
}

#[test]
fn changed_entry_keeps_cached_ends_before_it() {
    let mut mkey = key(2, 0, 4000, klm(4, 7, 0).repeat(1000));
    assert_eq!(mkey.range(3999), Ok((999, 3, 1)));
    mkey.set_table(990 * KLM, &klm(5, 7, 0)).unwrap();
    assert_eq!(mkey.ends.borrow().len(), 990);
    assert_eq!(mkey.range(100), Ok((25, 0, 4)));
    assert_eq!(mkey.ends.borrow().len(), 990);
    assert_eq!(mkey.range(4000), Ok((999, 3, 1)));
}

#[test]
fn changed_table_changes_translation() {
    let mut keys = new_keys();
    let region = add(&mut keys, key(1, 0, 4096, pages(&[0x1000])));
    let table = [klm(8, region, 0), klm(8, region, 100)].concat();
    let number = add(&mut keys, key(2, 0, 16, table));
    let at = |keys: &Table<Mkey>| look(keys, number, Access::LocalRead, 8, 4).unwrap()[0].place;
    assert_eq!(at(&keys), Place::Guest(0x1000 + 100));
    let mkey = keys.get_mut(number >> 8).unwrap();
    assert_eq!(mkey.set_table(0, &klm(4, region, 0)), Some(()));
    assert_eq!(at(&keys), Place::Guest(0x1000 + 104));
    let mkey = keys.get_mut(number >> 8).unwrap();
    assert_eq!(mkey.set_table(KLM + 1, &klm(4, region, 0)), None);
}

#[test]
fn unbounded_addresses_wrap() {
    let mut keys = new_keys();
    let mut mkey = key(1, 0, 0, [vec![0; 8], pages(&[0, 0, 0])].concat());
    set!(mkey.context, mkc, length64, 1u32);
    set!(mkey.context, mkc, log_page_size, 62u32);
    let number = add(&mut keys, mkey);
    let found = look(&keys, number, Access::LocalRead, u64::MAX - 7, 16);
    let absent = Absent {
        key: number,
        address: 0,
        length: 8,
    };
    assert_eq!(found, Err(MkeyFault::Absent(absent)));
}
