// SPDX-License-Identifier: GPL-2.0

//! Tests of the messages: exact bytes and limits here, properties of all messages in `properties`.

use super::*;
use crate::{
    atomic::Atomic,
    name::Name,
    rights::Rights,
    ticket::{Said, Wish},
};

mod properties;

const REQUEST: Header = Header {
    kind: Kind::Request,
    call: 0x0102_0304_0506_0708,
    epoch: 9,
    floor: 5,
};
const REPLY: Header = Header {
    kind: Kind::Reply,
    ..REQUEST
};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn request(request: &Request<'_>) -> Vec<u8> {
    let mut out = vec![0xaa; MESSAGE_SIZE];
    let len = encode_request(&REQUEST, request, &mut out).unwrap();
    out.truncate(len);
    out
}

fn reply(reply: &Reply<'_>) -> Vec<u8> {
    let mut out = vec![0xaa; MESSAGE_SIZE];
    let len = encode_reply(&REPLY, reply, &mut out).unwrap();
    out.truncate(len);
    out
}

#[test]
fn bytes_never_change() {
    let (region, mapping, uid, rights) = (1, 2, 1000, Rights::READ);
    let map = request(&Request::Map {
        region,
        mapping,
        uid,
        rights,
    });
    let expected = b"\x01\x01\x07\0\x38\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\x09\0\0\0\0\0\0\0\
        \x05\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\xe8\x03\0\0\x01\0\0\0";
    assert_eq!(map, expected);
    let failed = reply(&Reply::Failed { errno: 13 });
    let expected = b"\x01\x02\x02\0\x24\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\x09\0\0\0\0\0\0\0\
        \x05\0\0\0\0\0\0\0\x0d\0\0\0";
    assert_eq!(failed, expected);
}

#[test]
fn header_is_checked() {
    let good = reply(&Reply::Done);
    assert_eq!(good.len(), HEADER_SIZE);
    assert_eq!(decode(&good), Ok((REPLY, Body::Reply(Reply::Done))));
    let odd = [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 3),
        (2, 0),
        (2, 8),
        (3, 1),
        (4, 23),
        (4, 25),
        (7, 1),
    ];
    for (at, value) in odd {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert_eq!(decode(&bytes), Err(Malformed), "{value} at {at}");
    }
}

#[test]
fn kind_must_match() {
    assert_eq!(encode_reply(&REQUEST, &Reply::Done, &mut [0; 100]), None);
    assert_eq!(
        encode_request(&REPLY, &Request::Release { lease: 1 }, &mut [0; 100]),
        None
    );
}

#[test]
fn fields_out_of_range_are_refused() {
    let alloc = |shift, chunks, tail| Request::Alloc {
        lease: 1,
        region: 2,
        shift,
        chunks,
        tail,
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
    let mapped = |len, shift| Reply::Mapped { len, shift };
    for odd in [mapped(0, 12), mapped(1, 11), mapped(u64::MAX, 22)] {
        assert_eq!(encode_reply(&REPLY, &odd, &mut [0; 100]), None);
    }
    for errno in [0, 4096, u32::MAX] {
        assert_eq!(
            encode_reply(&REPLY, &Reply::Failed { errno }, &mut [0; 100]),
            None
        );
    }
}

/// Spoils a byte of the body of a good message.
fn assert_odd(mut bytes: Vec<u8>, at: usize, value: u8) {
    assert!(decode(&bytes).is_ok());
    bytes[HEADER_SIZE + at] = value;
    assert_eq!(decode(&bytes), Err(Malformed), "{value} at {at}");
}

#[test]
fn bodies_are_checked() {
    let alloc = Request::Alloc {
        lease: 1,
        region: 2,
        shift: 12,
        chunks: 1,
        tail: 4096,
    };
    for (at, value) in [(16, 11), (16, 23), (17, 0), (21, 1), (22, 0)] {
        assert_odd(request(&alloc), at, value);
    }
    let atomic = Request::Atomic {
        number: 1,
        home: 2,
        region: 3,
        chunk: 4096,
        offset: 8,
        atomic: Atomic::Swap { operand: 5 },
    };
    for (at, value) in [(0, 0), (28, 1), (32, 0), (32, 4), (32, 2)] {
        assert_odd(request(&atomic), at, value);
    }
    let change = Request::Change {
        number: 1,
        key: 2,
        uid: 3,
        addr: 8,
        atomic: Atomic::Swap { operand: 5 },
    };
    for (at, value) in [(0, 0), (16, 1), (24, 0), (24, 4)] {
        assert_odd(request(&change), at, value);
    }
    let enter = Request::Enter {
        ticket: 1,
        region: 2,
        mapping: 3,
        line: 4,
        wish: Wish::Barrier { count: 1 },
        waits: true,
    };
    for (at, value) in [(0, 0), (32, 0), (32, 4), (33, 0), (37, 2)] {
        assert_odd(request(&enter), at, value);
    }
    let said = Said::Locked { warned: true };
    let granted = request(&Request::Granted { ticket: 1, said });
    for (at, value) in [(8, 6), (8, 0x22), (8, 0x15), (15, 1)] {
        assert_odd(granted.clone(), at, value);
    }
    let map = Request::Map {
        region: 1,
        mapping: 2,
        uid: 3,
        rights: Rights::ALL,
    };
    assert_odd(request(&map), 20, 8);
    assert_odd(request(&map), 23, 1);
    assert_odd(reply(&Reply::Failed { errno: 1 }), 0, 0);
    assert_odd(reply(&Reply::Failed { errno: 1 }), 1, 16);
    assert_odd(reply(&Reply::Mapped { len: 1, shift: 12 }), 0, 0);
    let sync = Request::Sync {
        epoch: 1,
        last: true,
        names: List::empty(),
    };
    assert_odd(request(&sync), 8, 2);
}

#[test]
fn names_are_checked() {
    let lookup = request(&Request::Lookup { name: name("abc") });
    assert_odd(lookup.clone(), 0, 0);
    assert_odd(lookup.clone(), 1, 0);
    assert_odd(lookup, 63, b'x');
    let full = request(&Request::Lookup {
        name: name(&"x".repeat(63)),
    });
    assert_odd(full, 63, b'x');
}

#[test]
fn items_are_checked() {
    let entry = Entry {
        name: name("n"),
        len: 1,
        owner: 2,
        others: Rights::READ,
        mappers: 3,
    };
    let mut out = [0; MESSAGE_SIZE];
    let mut writer = ListWriter::entries(&mut out, 1, 2);
    assert!(writer.push(entry) && writer.push(entry));
    let len = writer.finish();
    assert_odd(out[..len].to_vec(), 8 + Entry::SIZE, 0);
    assert_odd(out[..len].to_vec(), 8 + 2 * Entry::SIZE - 8, 8);
}

fn fill<T: Item + Copy>(mut writer: ListWriter<'_, T>, item: T) -> (usize, usize) {
    let count = std::iter::repeat_with(|| writer.push(item))
        .take_while(|fits| *fits)
        .count();
    (count, writer.finish())
}

#[test]
fn lists_fill_a_message() {
    let mut out = [0xaa; 2 * MESSAGE_SIZE];
    assert_eq!(fill(ListWriter::addresses(&mut out, 1, 2), 3), (124, 1024));
    assert_eq!(
        fill(ListWriter::located(&mut out, 1, 2), Place::default()),
        (49, 1012)
    );
    assert_eq!(
        fill(ListWriter::names(&mut out, 1, 2, 3), (name("n"), 4)),
        (13, 977)
    );
    let entry = Entry {
        name: name("n"),
        len: 1,
        owner: 2,
        others: Rights::READ,
        mappers: 3,
    };
    assert_eq!(fill(ListWriter::entries(&mut out, 1, 2), entry), (11, 964));
    assert_eq!(out[MESSAGE_SIZE..], [0xaa; MESSAGE_SIZE]);
}

#[test]
fn tiny_buffers_hold_no_list() {
    for room in [0, 1, HEADER_SIZE - 1] {
        assert_eq!(
            fill(
                ListWriter::addresses(&mut [0; HEADER_SIZE][..room], 1, 2),
                3
            ),
            (0, 0)
        );
    }
    for room in [HEADER_SIZE, HEADER_SIZE + 8] {
        let mut out = [0; HEADER_SIZE + 16];
        let mut writer = ListWriter::names(&mut out[..room], 1, 2, 3);
        writer.set_last(true);
        assert_eq!(fill(writer, (name("n"), 4)), (0, 0));
    }
    let mut out = [0; HEADER_SIZE];
    assert_eq!(
        fill(ListWriter::addresses(&mut out, 1, 2), 3),
        (0, HEADER_SIZE)
    );
}

#[test]
fn debug_shows_items() {
    let mut out = [0; 100];
    let mut writer = ListWriter::addresses(&mut out, 1, 2);
    assert!(writer.push(3) && writer.push(4));
    let len = writer.finish();
    let (_, body) = decode(&out[..len]).unwrap();
    assert_eq!(format!("{body:?}"), "Reply(Addresses([3, 4]))");
}
