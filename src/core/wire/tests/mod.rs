// SPDX-License-Identifier: GPL-2.0

//! Tests of control messages: exact encodings and limits. `properties` has the property tests.

use super::*;
use crate::{
    atomic::AtomicOp,
    layout::MAX_CHUNK_SHIFT,
    name::Name,
    rights::Rights,
    sync::ticket::{AcquireKind, AcquireReply},
};

mod properties;
mod strategies;

const REQUEST: ControlHeader = ControlHeader {
    kind: ControlKind::Request,
    request_id: 0x0102_0304_0506_0708,
    epoch: 9,
    low_watermark: 5,
};
const REPLY: ControlHeader = ControlHeader {
    kind: ControlKind::Reply,
    ..REQUEST
};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn named_region() -> NamedRegion {
    NamedRegion {
        name: name("n"),
        created_at: 3,
        home: 5,
        region: 4,
    }
}

fn mapped_reply(len: u64, shift: u8) -> ControlReply<'static> {
    ControlReply::Mapped {
        len,
        shift,
        owner_uid: 1000,
        is_named: true,
    }
}

fn listed_region() -> RegionInfo {
    RegionInfo {
        name: name("n"),
        region: 4,
        created_at: 5,
        len: 1,
        owner_uid: 2,
        other_rights: Rights::READ,
        mapping_count: 3,
    }
}

fn request(request: &ControlRequest<'_>) -> Vec<u8> {
    let mut out = vec![0xaa; MAX_CONTROL_BYTES];
    let len = encode_request(&REQUEST, request, &mut out).unwrap();
    out.truncate(len);
    out
}

fn reply(reply: &ControlReply<'_>) -> Vec<u8> {
    let mut out = vec![0xaa; MAX_CONTROL_BYTES];
    let len = encode_reply(&REPLY, reply, &mut out).unwrap();
    out.truncate(len);
    out
}

#[test]
fn encoding_of_known_messages_never_changes() {
    let (region, mapping, uid, rights) = (1, 2, 1000, Rights::READ);
    let map = request(&ControlRequest::MapRegion {
        region,
        mapping,
        uid,
        rights,
    });
    let expected = b"\x04\x01\x07\0\x38\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\x09\0\0\0\0\0\0\0\
        \x05\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\xe8\x03\0\0\x01\0\0\0";
    assert_eq!(map, expected);
    let failed = reply(&ControlReply::Failed { errno: 13 });
    let expected = b"\x04\x02\x02\0\x24\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\x09\0\0\0\0\0\0\0\
        \x05\0\0\0\0\0\0\0\x0d\0\0\0";
    assert_eq!(failed, expected);
}

#[test]
fn region_created_first_precedes_others_of_its_name() {
    let entry = |text, created_at, home, region| NamedRegion {
        name: name(text),
        created_at,
        home,
        region,
    };
    let ordered = [
        entry("a", 9, 1, 1),
        NamedRegion::first(name("b")),
        entry("b", 1, 9, 9),
        entry("b", 2, 1, 9),
        entry("b", 2, 1, 10),
        entry("b", 2, 2, 1),
        entry("b", u64::MAX, 1, 1),
        entry("c", 0, 1, 1),
    ];
    assert!(ordered.is_sorted_by(|a, b| a < b));
}

#[test]
fn encoding_of_known_names_never_changes() {
    let mut out = [0; MAX_CONTROL_BYTES];
    let len = strategies::write_list(ListWriter::names(&mut out, 1, 2, 3), vec![named_region()]);
    let list = &out[CONTROL_HEADER_SIZE..len];
    assert_eq!(list[..9], *b"\x03\0\0\0\0\0\0\0\0");
    assert_eq!(list[9..73], *name("n").as_field());
    let expected = b"\x03\0\0\0\0\0\0\0\x05\0\0\0\x04\0\0\0\0\0\0\0";
    assert_eq!(list[73..], *expected);
}

#[test]
fn invalid_header_is_malformed() {
    let good = reply(&ControlReply::Done);
    assert_eq!(good.len(), CONTROL_HEADER_SIZE);
    assert_eq!(
        decode_control(&good),
        Ok((REPLY, ControlBody::Reply(ControlReply::Done)))
    );
    let invalid = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 3),
        (2, 0),
        (2, 8),
        (3, 1),
        (4, 23),
        (4, 25),
        (7, 1),
    ];
    for (at, value) in invalid {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert_eq!(decode_control(&bytes), Err(Malformed), "{value} at {at}");
    }
}

#[test]
fn encode_with_header_of_another_kind_fails() {
    assert_eq!(
        encode_reply(&REQUEST, &ControlReply::Done, &mut [0; 100]),
        None
    );
    assert_eq!(
        encode_request(
            &REPLY,
            &ControlRequest::ReleaseLoan { loan: 1 },
            &mut [0; 100]
        ),
        None
    );
}

/// The last chunk ends at the last address.
#[test]
fn chunk_beyond_the_address_space_is_malformed() {
    let last_addr = u64::MAX - (1 << MAX_CHUNK_SHIFT);
    for (addr, is_valid) in [(last_addr, true), (last_addr + 1, false), (u64::MAX, false)] {
        let mut out = [0; MAX_CONTROL_BYTES];
        let len = strategies::write_list(ListWriter::addresses(&mut out, 1, 2), vec![4096, addr]);
        assert_eq!(decode_control(&out[..len]).is_ok(), is_valid, "{addr:#x}");
        let location = ChunkLocation {
            addr,
            ..ChunkLocation::default()
        };
        let len =
            strategies::write_list(ListWriter::chunk_locations(&mut out, 1, 2), vec![location]);
        assert_eq!(decode_control(&out[..len]).is_ok(), is_valid, "{addr:#x}");
    }
}

#[test]
fn directory_beyond_the_address_space_is_not_encoded() {
    for (addr, is_valid) in [(u64::MAX - 1024, true), (u64::MAX - 1023, false)] {
        let directory = ControlReply::DirectoryAddr {
            addr,
            bucket_count: 4,
        };
        let encoded = encode_reply(&REPLY, &directory, &mut [0; 100]);
        assert_eq!(encoded.is_some(), is_valid, "{addr:#x}");
    }
}

#[test]
fn message_with_out_of_range_field_is_not_encoded() {
    let alloc = |shift, chunks, tail| ControlRequest::AllocLoan {
        loan: 1,
        region: 2,
        shift,
        chunk_count: chunks,
        last_chunk_len: tail,
    };
    for (shift, chunks, tail) in [
        (11, 1, 1),
        (23, 1, 1),
        (12, 0, 1),
        (12, 1, 0),
        (12, 1, 4097),
    ] {
        assert_eq!(
            encode_request(&REQUEST, &alloc(shift, chunks, tail), &mut [0; 100]),
            None
        );
    }
    let mapped = mapped_reply;
    for invalid in [mapped(0, 12), mapped(1, 11), mapped(u64::MAX, 22)] {
        assert_eq!(encode_reply(&REPLY, &invalid, &mut [0; 100]), None);
    }
    for errno in [0, 4096, u32::MAX] {
        assert_eq!(
            encode_reply(&REPLY, &ControlReply::Failed { errno }, &mut [0; 100]),
            None
        );
    }
}

/// Asserts that a valid message becomes malformed if byte `at` of its body is set to `value`.
fn assert_malformed(mut bytes: Vec<u8>, at: usize, value: u8) {
    assert!(decode_control(&bytes).is_ok());
    bytes[CONTROL_HEADER_SIZE + at] = value;
    assert_eq!(decode_control(&bytes), Err(Malformed), "{value} at {at}");
}

#[test]
fn invalid_body_is_malformed() {
    let alloc = ControlRequest::AllocLoan {
        loan: 1,
        region: 2,
        shift: 12,
        chunk_count: 1,
        last_chunk_len: 4096,
    };
    for (at, value) in [(16, 11), (16, 23), (17, 0), (21, 1), (22, 0)] {
        assert_malformed(request(&alloc), at, value);
    }
    let atomic = ControlRequest::RegionAtomic {
        sequence: 1,
        home: 2,
        region: 3,
        chunk_addr: 4096,
        offset: 8,
        op: AtomicOp::Swap { operand: 5 },
    };
    for (at, value) in [(0, 0), (28, 1), (32, 0), (32, 4), (32, 2)] {
        assert_malformed(request(&atomic), at, value);
    }
    let change = ControlRequest::MrAtomic {
        sequence: 1,
        mr_key: 2,
        uid: 3,
        addr: 8,
        op: AtomicOp::Swap { operand: 5 },
    };
    for (at, value) in [(0, 0), (16, 1), (24, 0), (24, 4)] {
        assert_malformed(request(&change), at, value);
    }
    let enter = ControlRequest::EnqueueWaiter {
        ticket: 1,
        region: 2,
        mapping: 3,
        sync_id: 4,
        kind: AcquireKind::Barrier { count: 1 },
        is_blocking: true,
    };
    for (at, value) in [(0, 0), (32, 0), (32, 4), (33, 0), (37, 2)] {
        assert_malformed(request(&enter), at, value);
    }
    let acquire_reply = AcquireReply::Granted { owner_died: true };
    let granted = request(&ControlRequest::NotifyGranted {
        ticket: 1,
        reply: acquire_reply,
    });
    for (at, value) in [(8, 6), (8, 0x22), (8, 0x15), (15, 1)] {
        assert_malformed(granted.clone(), at, value);
    }
    let map = ControlRequest::MapRegion {
        region: 1,
        mapping: 2,
        uid: 3,
        rights: Rights::ALL,
    };
    assert_malformed(request(&map), 20, 8);
    assert_malformed(request(&map), 23, 1);
    assert_malformed(reply(&ControlReply::Failed { errno: 1 }), 0, 0);
    assert_malformed(reply(&ControlReply::Failed { errno: 1 }), 1, 16);
    assert_malformed(reply(&mapped_reply(1, 12)), 0, 0);
    assert_malformed(reply(&mapped_reply(1, 12)), 13, 2);
    let sync = ControlRequest::SyncNames {
        epoch: 1,
        is_last: true,
        names: WireList::empty(),
    };
    assert_malformed(request(&sync), 8, 2);
}

#[test]
fn invalid_name_is_malformed() {
    let lookup = request(&ControlRequest::LookupName { name: name("abc") });
    assert_malformed(lookup.clone(), 0, 0);
    assert_malformed(lookup.clone(), 1, 0);
    assert_malformed(lookup, 63, b'x');
    let full = request(&ControlRequest::LookupName {
        name: name(&"x".repeat(63)),
    });
    assert_malformed(full, 63, b'x');
}

#[test]
fn invalid_list_item_is_malformed() {
    let entry = listed_region();
    let mut out = [0; MAX_CONTROL_BYTES];
    let mut writer = ListWriter::regions(&mut out, 1, 2);
    assert!(writer.push(entry) && writer.push(entry));
    let len = writer.finish();
    assert_malformed(out[..len].to_vec(), 8 + RegionInfo::SIZE, 0);
    assert_malformed(out[..len].to_vec(), 8 + 2 * RegionInfo::SIZE - 8, 8);
}

fn fill_list<T: ListItem + Copy>(mut writer: ListWriter<'_, T>, item: T) -> (usize, usize) {
    let count = std::iter::repeat_with(|| writer.push(item))
        .take_while(|is_written| *is_written)
        .count();
    (count, writer.finish())
}

#[test]
fn list_writer_stops_when_the_message_is_full() {
    let mut out = [0xaa; 2 * MAX_CONTROL_BYTES];
    assert_eq!(
        fill_list(ListWriter::addresses(&mut out, 1, 2), 3),
        (124, 1024)
    );
    assert_eq!(
        fill_list(
            ListWriter::chunk_locations(&mut out, 1, 2),
            ChunkLocation::default()
        ),
        (49, 1012)
    );
    assert_eq!(
        fill_list(ListWriter::names(&mut out, 1, 2, 3), named_region()),
        (11, 965)
    );
    let entry = listed_region();
    assert_eq!(
        fill_list(ListWriter::regions(&mut out, 1, 2), entry),
        (9, 940)
    );
    assert_eq!(out[MAX_CONTROL_BYTES..], [0xaa; MAX_CONTROL_BYTES]);
}

#[test]
fn list_writer_in_a_tiny_buffer_writes_nothing() {
    for room in [0, 1, CONTROL_HEADER_SIZE - 1] {
        assert_eq!(
            fill_list(
                ListWriter::addresses(&mut [0; CONTROL_HEADER_SIZE][..room], 1, 2),
                3
            ),
            (0, 0)
        );
    }
    for room in [CONTROL_HEADER_SIZE, CONTROL_HEADER_SIZE + 8] {
        let mut out = [0; CONTROL_HEADER_SIZE + 16];
        let mut writer = ListWriter::names(&mut out[..room], 1, 2, 3);
        writer.set_last(true);
        assert_eq!(fill_list(writer, named_region()), (0, 0));
    }
    let mut out = [0; CONTROL_HEADER_SIZE];
    assert_eq!(
        fill_list(ListWriter::addresses(&mut out, 1, 2), 3),
        (0, CONTROL_HEADER_SIZE)
    );
}

#[test]
fn debug_output_shows_list_items() {
    let mut out = [0; 100];
    let mut writer = ListWriter::addresses(&mut out, 1, 2);
    assert!(writer.push(3) && writer.push(4));
    let len = writer.finish();
    let (_, body) = decode_control(&out[..len]).unwrap();
    assert_eq!(format!("{body:?}"), "Reply(Addresses([3, 4]))");
}
