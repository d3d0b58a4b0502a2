// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Translation against a model, which lists the address of each byte of a key.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Key in the model: its start, and the address of each of its bytes.
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

/// Adds a key of pages that starts at an offset in its first page.
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

/// Limits offset and length to a part of a list of `of` elements.
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
        Err(MkeyFault::Range)
    );
    if model.start > 0 {
        assert_eq!(
            look(keys, model.key, Access::LocalRead, model.start - 1, 1),
            Err(MkeyFault::Range)
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
    fn mtt_address_translates_to_pages_in_order((log, numbers, skip, cut) in some_pages(), offset: usize, length in 0usize..30_000) {
        let mut keys = new_keys();
        let model = add_pages(&mut keys, log, &numbers, skip, cut);
        check(&keys, &model, offset, length);
    }

    #[test]
    fn klm_address_translates_to_ranges_in_order(
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
    fn cached_range_ends_match_changed_table(
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
    fn repeated_ranges_advance_by_stride(
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
    fn ksm_address_translates_to_pages_of_keys(
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
    fn arbitrary_table_and_address_do_not_panic(
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
