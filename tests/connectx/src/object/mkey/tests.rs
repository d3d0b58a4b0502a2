// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Translation against a model: for each key, a plain list of where its bytes are.

use proptest::collection::vec;
use proptest::prelude::*;

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

/// A key that allows all, with this table.
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

/// Adds a key and returns all of its number.
fn add(keys: &mut Table<Mkey>, mkey: Mkey) -> u32 {
    (keys.insert(mkey).unwrap() << 8) | 7
}

fn look(
    keys: &Table<Mkey>,
    key: u32,
    access: Access,
    address: u64,
    length: u64,
) -> Result<Vec<Piece>, Fault> {
    translate(keys, key, user(access), address, length, &mut |_, _| ())
}

/// Where each byte is.
fn bytes(pieces: &[Piece]) -> Vec<u64> {
    let at = |piece: &Piece| match piece.place {
        Place::Guest(at) => at..at + piece.length,
        other => panic!("{other:?} in the guest's memory"),
    };
    pieces.iter().flat_map(at).collect()
}

/// A key as the model has it: where it begins, and where each of its bytes is.
#[derive(Clone, Debug)]
struct Model {
    key: u32,
    start: u64,
    bytes: Vec<u64>,
}

impl Model {
    fn part(&self, offset: usize, length: usize) -> &[u64] {
        &self.bytes[offset..offset + length]
    }
}

fn new_keys() -> Table<Mkey> {
    Table::new(FIRST, 1000)
}

/// A key of pages that begins somewhere on its first page.
fn add_pages(keys: &mut Table<Mkey>, log: u32, numbers: &[u64], skip: u64, cut: u64) -> Model {
    let size = 1 << log;
    let (skip, cut) = (skip % size, cut % size);
    let start = (0x7000_0000 >> log << log) + skip;
    let addresses: Vec<u64> = numbers.iter().map(|number| number << log).collect();
    let all: Vec<u64> = addresses
        .iter()
        .flat_map(|address| *address..address + size)
        .collect();
    let end = (all.len() as u64 - cut).max(skip);
    let bytes = all[skip as usize..end as usize].to_vec();
    let mut mkey = key(1, start, bytes.len() as u64, pages(&addresses));
    set!(mkey.context, mkc, log_page_size, log);
    Model {
        key: add(keys, mkey),
        start,
        bytes,
    }
}

fn some_pages() -> impl Strategy<Value = (u32, Vec<u64>, u64, u64)> {
    (12u32..14, vec(1u64..64, 1..5), any::<u64>(), any::<u64>())
}

/// A part of a list: offset and length, of which something is left.
fn clip(of: usize, offset: usize, length: usize) -> (usize, usize) {
    let offset = offset % (of + 1);
    (offset, length.min(of - offset))
}

fn check(keys: &Table<Mkey>, model: &Model, offset: usize, length: usize) {
    let (offset, length) = clip(model.bytes.len(), offset, length);
    let address = model.start + offset as u64;
    let pieces = look(keys, model.key, Access::RemoteWrite, address, length as u64).unwrap();
    assert_eq!(bytes(&pieces), model.part(offset, length));
    let beyond = (model.bytes.len() - offset) as u64 + 1;
    assert_eq!(
        look(keys, model.key, Access::LocalRead, address, beyond),
        Err(Fault::Range)
    );
    if model.start > 0 {
        assert_eq!(
            look(keys, model.key, Access::LocalRead, model.start - 1, 1),
            Err(Fault::Range)
        );
    }
}

/// A range, or the entry before repeated ranges.
fn some_range() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => (0u32..50).prop_map(|length| klm(length, 7, 0)),
        1 => (0u64..8).prop_map(|ranges| klm(100, REPEATED, (5 << 32) | ranges)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pages_are_found_in_their_order((log, numbers, skip, cut) in some_pages(), offset: usize, length in 0usize..30_000) {
        let mut keys = new_keys();
        let model = add_pages(&mut keys, log, &numbers, skip, cut);
        check(&keys, &model, offset, length);
    }

    #[test]
    fn ranges_of_keys_follow_one_another(
        regions in vec(some_pages(), 1..3),
        ranges in vec((any::<usize>(), any::<usize>(), 0usize..9000), 1..6),
        start in 0u64..1 << 40,
        offset: usize,
        length in 0usize..30_000,
    ) {
        let mut keys = new_keys();
        let regions: Vec<Model> =
            regions.iter().map(|(log, numbers, skip, cut)| add_pages(&mut keys, *log, numbers, *skip, *cut)).collect();
        let (mut table, mut all) = (Vec::new(), Vec::new());
        for (region, offset, length) in ranges {
            let region = &regions[region % regions.len()];
            let (offset, length) = clip(region.bytes.len(), offset, length);
            table.extend(klm(length as u32, region.key, region.start + offset as u64));
            all.extend(region.part(offset, length));
        }
        let model = Model { key: add(&mut keys, key(2, start, all.len() as u64, table)), start, bytes: all };
        check(&keys, &model, offset, length);
    }

    #[test]
    fn ranges_are_those_of_the_table_as_it_is(
        table in vec(some_range(), 1..8),
        changes in vec((any::<usize>(), some_range(), 0u64..400), 1..20),
    ) {
        let mut mkey = key(2, 0, 4096, table.concat());
        for (entry, range, at) in changes {
            mkey.set_table(entry % table.len() * KLM, &range).unwrap();
            let new = key(2, 0, 4096, mkey.table().to_vec());
            prop_assert_eq!(mkey.range(at), new.range(at));
        }
    }

    #[test]
    fn ranges_repeat_with_their_strides(
        region in vec(1u64..64, 5),
        ranges in vec((0usize..2000, 1usize..300, 0usize..300), 1..4),
        turns in 1usize..5,
        offset: usize,
        length in 0usize..6000,
    ) {
        let mut keys = new_keys();
        let region = add_pages(&mut keys, 12, &region, 0, 0);
        let per_turn: usize = ranges.iter().map(|(_, length, _)| length).sum();
        let mut table = klm(per_turn as u32, REPEATED, ((turns as u64) << 32) | ranges.len() as u64);
        for (offset, length, gap) in &ranges {
            let stride = length + gap;
            table.extend(klm(((stride << 16) | length) as u32, region.key, region.start + *offset as u64));
        }
        let bytes: Vec<u64> = (0..turns)
            .flat_map(|turn| ranges.iter().map(move |(offset, length, gap)| (offset + turn * (length + gap), *length)))
            .flat_map(|(offset, length)| region.part(offset, length))
            .copied()
            .collect();
        let model = Model { key: add(&mut keys, key(2, 0, bytes.len() as u64, table)), start: 0, bytes };
        check(&keys, &model, offset, length);
    }

    #[test]
    fn equal_pages_of_keys_are_found(
        region in vec(1u64..64, 4),
        parts in vec(0u64..4, 1..6),
        skip in 0u64..4096,
        offset: usize,
        length in 0usize..30_000,
    ) {
        let mut keys = new_keys();
        let region = add_pages(&mut keys, 12, &region, 0, 0);
        let table = parts.iter().flat_map(|part| klm(0, region.key, region.start + part * 4096)).collect();
        let all: Vec<u64> = parts.iter().flat_map(|part| region.part(*part as usize * 4096, 4096)).copied().collect();
        let bytes = all[skip as usize..].to_vec();
        let start = 0x5000 + skip;
        let model = Model { key: add(&mut keys, key(3, start, bytes.len() as u64, table)), start, bytes };
        check(&keys, &model, offset, length);
    }

    #[test]
    fn any_table_and_any_address_ends_well(
        mode in 0u32..8,
        table in vec(any::<u8>(), 0..256),
        log_page_size in 12u32..=62,
        start: u64,
        len: u64,
        length64: bool,
        address: u64,
        length in 0u64..1 << 33,
    ) {
        let mut context = key(1, start, len, Vec::new()).context;
        set!(context, mkc, access_mode_1_0, mode & 3);
        set!(context, mkc, access_mode_4_2, mode >> 2);
        set!(context, mkc, log_page_size, log_page_size);
        set!(context, mkc, length64, u32::from(length64));
        if let Some(mode) = Mode::of(&context) {
            let mut keys = new_keys();
            let number = add(&mut keys, Mkey::new(context, mode, table));
            if let Ok(pieces) = look(&keys, number, Access::LocalRead, address, length) {
                prop_assert_eq!(pieces.iter().map(|piece| piece.length).sum::<u64>(), length);
            }
        }
    }
}

#[test]
fn each_right_is_needed_for_its_access() {
    let all = [
        Access::LocalRead,
        Access::LocalWrite,
        Access::RemoteRead,
        Access::RemoteWrite,
        Access::RemoteAtomic,
    ];
    for (taken, denied) in all.iter().enumerate() {
        let mut mkey = key(1, 0, 4096, pages(&[0x1000]));
        match denied {
            Access::LocalRead => set!(mkey.context, mkc, lr, 0u32),
            Access::LocalWrite => set!(mkey.context, mkc, lw, 0u32),
            Access::RemoteRead => set!(mkey.context, mkc, rr, 0u32),
            Access::RemoteWrite => set!(mkey.context, mkc, rw, 0u32),
            Access::RemoteAtomic => set!(mkey.context, mkc, a, 0u32),
        }
        let mut keys = new_keys();
        let number = add(&mut keys, mkey);
        for (asked, access) in all.iter().enumerate() {
            let found = look(&keys, number, *access, 0, 8).map(|_| ());
            let expected = if asked == taken {
                Err(Fault::Rights)
            } else {
                Ok(())
            };
            assert_eq!(found, expected, "{access:?} of a key without {denied:?}");
        }
    }
}

#[test]
fn a_window_lets_a_peer_do_what_its_region_lets_the_owner_do() {
    let mut region = key(1, 0, 4096, pages(&[0x1000]));
    set!(region.context, mkc, rr, 0u32);
    set!(region.context, mkc, rw, 0u32);
    let mut keys = new_keys();
    let region = add(&mut keys, region);
    let window = add(&mut keys, key(2, 0x100, 16, klm(16, region, 0x20)));
    let found = look(&keys, window, Access::RemoteWrite, 0x100, 16);
    assert_eq!(found.map(|pieces| bytes(&pieces)[0]), Ok(0x1020));
    assert_eq!(
        look(&keys, region, Access::RemoteWrite, 0x20, 16),
        Err(Fault::Rights)
    );
    if let Some(region) = keys.get_mut(region >> 8) {
        set!(region.context, mkc, lw, 0u32);
    }
    assert_eq!(
        look(&keys, window, Access::RemoteWrite, 0x100, 16),
        Err(Fault::Rights)
    );
    assert!(look(&keys, window, Access::RemoteRead, 0x100, 16).is_ok());
}

#[test]
fn a_key_is_refused_for_what_it_is_not() {
    let mut keys = new_keys();
    let number = add(
        &mut keys,
        key(1, 0, 8192, [pages(&[0x1000]), vec![0; 8]].concat()),
    );
    let of = |keys: &Table<Mkey>, number, user| {
        translate(keys, number, user, 0, 8, &mut |_, _| ()).map(|_| ())
    };
    let me = user(Access::LocalRead);
    assert_eq!(of(&keys, number, me), Ok(()));
    assert_eq!(of(&keys, number ^ 1, me), Err(Fault::Key));
    assert_eq!(of(&keys, number + 0x100, me), Err(Fault::Key));
    assert_eq!(
        of(&keys, number, User { pd: PD + 1, ..me }),
        Err(Fault::Domain)
    );
    assert_eq!(
        look(&keys, number, Access::LocalRead, 4090, 8),
        Err(Fault::Absent(Absent {
            key: number,
            address: 4096,
            length: 2
        }))
    );
    let change = |keys: &mut Table<Mkey>, act: fn(&mut [u8])| {
        act(&mut keys.get_mut(number >> 8).unwrap().context)
    };
    change(&mut keys, |context| set!(context, mkc, qpn, QP + 1));
    assert_eq!(of(&keys, number, me), Err(Fault::Owner));
    assert_eq!(of(&keys, number, User { qp: QP + 1, ..me }), Ok(()));
    change(&mut keys, |context| set!(context, mkc, free, 1u32));
    assert_eq!(of(&keys, number, me), Err(Fault::Free));
}

#[test]
fn keys_that_refer_to_one_another_in_a_circle_end() {
    let mut keys = new_keys();
    let own = (FIRST << 8) | 7;
    let number = add(&mut keys, key(2, 0, 4096, klm(4096, own, 0)));
    assert_eq!(number, own);
    assert_eq!(
        look(&keys, number, Access::LocalRead, 0, 8),
        Err(Fault::Depth)
    );
}

#[test]
fn physical_device_and_null_memory_are_where_they_are() {
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
        Err(Fault::Range)
    );
    assert_eq!(
        look(&keys, NULL, Access::LocalRead, 0, 8),
        piece(Place::Null)
    );
}

#[test]
fn only_a_key_that_allows_it_is_invalidated() {
    let mut keys = new_keys();
    let number = add(&mut keys, key(1, 0, 4096, pages(&[0x1000])));
    assert_eq!(invalidate(&mut keys, number, PD, QP), Err(Fault::Rights));
    if let Some(mkey) = keys.get_mut(number >> 8) {
        set!(mkey.context, mkc, en_rinval, 1u32);
        set!(mkey.context, mkc, umr_en, 1u32);
    }
    assert_eq!(invalidate(&mut keys, number ^ 1, PD, QP), Err(Fault::Key));
    assert_eq!(
        invalidate(&mut keys, number, PD + 1, QP),
        Err(Fault::Domain)
    );
    assert_eq!(invalidate(&mut keys, number, PD, QP), Ok(()));
    assert_eq!(
        look(&keys, number, Access::LocalRead, 0, 8),
        Err(Fault::Free)
    );
}

#[test]
fn each_entry_that_is_read_is_told_of() {
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
fn entries_without_a_byte_are_passed_over() {
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
    // Two parts, and one entry for each at each key.
    assert_eq!(count, 2 * DEPTH);
}

#[test]
fn what_is_known_of_a_table_before_a_change_stays() {
    let mut mkey = key(2, 0, 4000, klm(4, 7, 0).repeat(1000));
    assert_eq!(mkey.range(3999), Ok((999, 3, 1)));
    mkey.set_table(990 * KLM, &klm(5, 7, 0)).unwrap();
    assert_eq!(mkey.ends.borrow().len(), 990);
    assert_eq!(mkey.range(100), Ok((25, 0, 4)));
    assert_eq!(mkey.ends.borrow().len(), 990);
    assert_eq!(mkey.range(4000), Ok((999, 3, 1)));
}

#[test]
fn a_table_that_changes_has_other_ranges() {
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
fn a_message_may_begin_if_the_key_that_it_names_allows_it() {
    let mut keys = new_keys();
    // What is behind it does not exist.
    let number = add(&mut keys, key(2, 0x1000, 1 << 30, klm(1 << 30, 7, 0)));
    let may = |access, address, length| super::check(&keys, number, user(access), address, length);
    assert_eq!(may(Access::RemoteWrite, 0x1000, 1 << 30), Ok(()));
    assert_eq!(may(Access::RemoteWrite, 0x1001, 1 << 30), Err(Fault::Range));
    let other = User {
        pd: PD + 1,
        ..user(Access::RemoteRead)
    };
    let denied = super::check(&keys, number, other, 0x1000, 8);
    assert_eq!(denied, Err(Fault::Domain));
    assert_eq!(super::check(&keys, 7, other, 0, 0), Ok(()));
    assert_eq!(super::check(&keys, 7, other, 0, 1), Err(Fault::Key));
}

#[test]
fn a_peer_cannot_name_null_memory() {
    let mut keys = new_keys();
    for access in [
        Access::RemoteRead,
        Access::RemoteWrite,
        Access::RemoteAtomic,
    ] {
        assert_eq!(look(&keys, NULL, access, 0, 8), Err(Fault::Key));
    }
    // Its owner may put it behind another key.
    let number = add(&mut keys, key(2, 0, 4096, klm(4096, NULL, 0)));
    let found = look(&keys, number, Access::RemoteWrite, 0, 8);
    let length = 8;
    let place = Place::Null;
    assert_eq!(found, Ok(vec![Piece { place, length }]));
}

#[test]
fn addresses_without_bounds_wrap() {
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
    assert_eq!(found, Err(Fault::Absent(absent)));
}
