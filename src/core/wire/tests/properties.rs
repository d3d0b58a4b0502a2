// SPDX-License-Identifier: GPL-2.0

//! Properties of all messages: they round trip, no other length is taken, and bytes that are taken
//! are those that an encoder writes.

use super::*;
use crate::atomic::Atomic;
use crate::layout::Layout;
use crate::lock::End;
use crate::ticket::{Said, Wish};
use crate::view::Life;
use crate::wire::targets::Target;
use proptest::prelude::*;

fn names() -> impl Strategy<Value = Name> {
    prop::collection::vec(1u8.., 1..64).prop_map(|bytes| Name::new(&bytes).unwrap())
}

fn rights() -> impl Strategy<Value = Rights> {
    (0u32..8).prop_map(|bits| Rights::from_bits(bits).unwrap())
}

fn atomics() -> impl Strategy<Value = Atomic> {
    (0u8..3, any::<(u64, u64)>()).prop_map(|(kind, (operand, expected))| match kind {
        0 => Atomic::FetchAdd { operand },
        1 => Atomic::CompareSwap { operand, expected },
        _ => Atomic::Swap { operand },
    })
}

fn spans() -> impl Strategy<Value = Span> {
    any::<(u32, u64, u64, u32)>().prop_map(|(home, region, chunk, offset)| Span {
        home,
        region,
        chunk,
        offset,
    })
}

fn wishes() -> impl Strategy<Value = Wish> {
    prop_oneof![
        any::<bool>().prop_map(|shared| Wish::Lock { shared }),
        (1u32..).prop_map(|count| Wish::Barrier { count }),
    ]
}

fn ends() -> impl Strategy<Value = End> {
    prop_oneof![Just(End::Unlocked), Just(End::GivenUp), Just(End::Died)]
}

/// Requests without a list.
fn requests() -> impl Strategy<Value = Request<'static>> {
    let ids = || any::<(u64, u64)>();
    prop_oneof![
        (ids(), 12u8..=22, 1u32.., 1u32..=4096).prop_map(
            |((lease, region), shift, chunks, tail)| Request::Alloc {
                lease,
                region,
                shift,
                chunks,
                tail,
            }
        ),
        (1u64.., any::<u32>(), ids(), 0u32..1 << 29, atomics()).prop_map(
            |(number, home, (region, chunk), word, atomic)| Request::Atomic {
                number,
                home,
                region,
                chunk,
                offset: 8 * word,
                atomic,
            }
        ),
        (1u64.., any::<(u32, u32)>(), 0u64..1 << 61, atomics()).prop_map(
            |(number, (key, uid), word, atomic)| Request::Change {
                number,
                key,
                uid,
                addr: 8 * word,
                atomic,
            }
        ),
        any::<(u64, u32)>().prop_map(|(lease, first)| Request::Chunks { lease, first }),
        any::<u64>().prop_map(|lease| Request::Release { lease }),
        (names(), any::<u64>()).prop_map(|(name, region)| Request::Register { name, region }),
        (names(), any::<u64>()).prop_map(|(name, region)| Request::Unregister { name, region }),
        names().prop_map(|name| Request::Lookup { name }),
        (ids(), any::<u32>(), rights()).prop_map(|((region, mapping), uid, rights)| {
            Request::Map {
                region,
                mapping,
                uid,
                rights,
            }
        }),
        any::<(u64, u32)>().prop_map(|(region, first)| Request::Locate { region, first }),
        ids().prop_map(|(region, mapping)| Request::Unmap { region, mapping }),
        ids().prop_map(|(region, mapping)| Request::Free { region, mapping }),
        (
            any::<u64>(),
            prop_oneof![Just(Reason::Freed), Just(Reason::Revoked)]
        )
            .prop_map(|(mapping, why)| Request::Invalidate { mapping, why }),
        any::<u64>().prop_map(|region| Request::Settle { region }),
        (1u64..).prop_map(|number| Request::Cancel { number }),
        (1u64.., ids(), any::<(bool, u32)>(), rights()).prop_map(
            |(number, (region, mapping), whom, rights)| Request::Grant {
                number,
                region,
                mapping,
                whom,
                rights,
            }
        ),
        any::<(u64, u32)>().prop_map(|(cursor, limit)| Request::List { cursor, limit }),
        any::<((u64, u64), u64, u16)>().prop_map(|((region, mapping), ring, number)| {
            Request::Attach {
                region,
                mapping,
                ring,
                number,
            }
        }),
        any::<(u64, u16)>().prop_map(|(ring, number)| Request::Detach { ring, number }),
        (1u64.., ids(), any::<u64>(), wishes(), any::<bool>()).prop_map(
            |(ticket, (region, mapping), line, wish, waits)| Request::Enter {
                ticket,
                region,
                mapping,
                line,
                wish,
                waits,
            }
        ),
        (1u64.., ids(), wishes(), ends()).prop_map(|(ticket, (region, line), wish, how)| {
            Request::Leave {
                ticket,
                region,
                line,
                wish,
                how,
            }
        }),
        (1u64.., spans(), any::<(u32, u8)>()).prop_map(|(number, at, (len, byte))| Request::Fill {
            number,
            at,
            len,
            byte,
        }),
        (1u64.., spans(), spans(), any::<u32>()).prop_map(|(number, from, to, len)| {
            Request::Copy {
                number,
                from,
                to,
                len,
            }
        }),
        (1u64..PUSH, spans(), places(), places(), 1u32..).prop_map(
            |(number, from, home, to, len)| Request::Push {
                number: number | PUSH,
                from,
                home: home.life,
                to,
                len,
            }
        ),
        ids().prop_map(|(region, token)| Request::Moving { region, token }),
        (1u64.., any::<u64>()).prop_map(|(number, region)| Request::Pause { number, region }),
        (any::<u64>(), 0u64..1 << 60).prop_map(|(ticket, generation)| Request::Granted {
            ticket,
            said: Said::Passed(generation),
        }),
        targets().prop_map(|target| Request::Publish { target }),
    ]
}

fn targets() -> impl Strategy<Value = Target> {
    let numbers = any::<(u32, u32)>();
    (1u32..=65535, any::<[u64; 4]>(), numbers).prop_map(
        |(node, [incarnation, epoch, key, regions], (number, rkey))| Target {
            life: Life { node, incarnation },
            epoch,
            number,
            key,
            rkey,
            regions,
        },
    )
}

/// Replies without a list.
fn replies() -> impl Strategy<Value = Reply<'static>> {
    prop_oneof![
        Just(Reply::Done),
        any::<u64>().prop_map(|word| Reply::Was { word }),
        any::<(u64, u16)>().prop_map(|(ring, number)| Reply::Attached { ring, number }),
        (any::<u64>(), 0u32..32).prop_map(|(addr, log)| Reply::Table {
            addr,
            buckets: 1 << log
        }),
        (1u32..4096).prop_map(|errno| Reply::Failed { errno }),
        any::<(u32, u64)>().prop_map(|(home, region)| Reply::Found { home, region }),
        (1u64..1 << 44, 12u8..=22)
            .prop_filter("a layout", |(len, shift)| Layout::new(*len, *shift)
                .is_some())
            .prop_map(|(len, shift)| Reply::Mapped { len, shift }),
    ]
}

fn places() -> impl Strategy<Value = Place> {
    any::<(u32, u64, u64)>().prop_map(|(node, incarnation, addr)| Place {
        life: Life { node, incarnation },
        addr,
    })
}

fn entries() -> impl Strategy<Value = Entry> {
    (names(), any::<(u64, u32, u32)>(), rights()).prop_map(
        |(name, (len, owner, mappers), others)| Entry {
            name,
            len,
            owner,
            others,
            mappers,
        },
    )
}

/// Writes `items` with `writer`, which must have room for them.
fn written<T: Item>(mut writer: ListWriter<'_, T>, items: Vec<T>) -> usize {
    assert!(items.into_iter().all(|item| writer.push(item)));
    writer.finish()
}

/// Builds a message that ends with a list from what is drawn.
fn lists() -> impl Strategy<Value = Vec<u8>> {
    fn message(write: impl FnOnce(&mut [u8]) -> usize) -> Vec<u8> {
        let mut out = vec![0xaa; MESSAGE_SIZE];
        let len = write(&mut out);
        out.truncate(len);
        out
    }
    let call = any::<(u64, u64)>();
    let addresses = prop::collection::vec(any::<u64>(), 0..20);
    let located = prop::collection::vec(places(), 0..20);
    let moved = prop::collection::vec((any::<u32>(), places()), 0..=MOVED_MAX);
    let nodes = prop::collection::vec(any::<u32>(), 1..=64);
    let ids = any::<(u64, u64, u64, u32)>();
    let named = prop::collection::vec((names(), any::<u64>()), 0..6);
    let listed = prop::collection::vec(entries(), 0..6);
    prop_oneof![
        (call, addresses).prop_map(|((c, e), items)| message(|out| written(
            ListWriter::addresses(out, c, e),
            items
        ))),
        (1u64.., any::<u64>(), moved).prop_map(|(number, region, items)| {
            let mut room = [0; MESSAGE_SIZE];
            let moved = List::collect(items.iter().copied(), &mut room);
            assert_eq!(moved.len(), items.len());
            request(&Request::Resume {
                number,
                region,
                moved,
            })
        }),
        (any::<u64>(), nodes.clone()).prop_map(|(lease, items)| {
            let mut room = [0; MESSAGE_SIZE];
            let chunks = List::collect(items, &mut room);
            request(&Request::Trim { lease, chunks })
        }),
        (1u64.., ids, nodes).prop_map(|(number, (region, mapping, token, timeout_ms), items)| {
            let mut room = [0; MESSAGE_SIZE];
            let nodes = List::collect(items.iter().copied(), &mut room);
            assert!(nodes.clone().eq(items));
            request(&Request::Move {
                number,
                region,
                mapping,
                token,
                timeout_ms,
                nodes,
            })
        }),
        (call, located).prop_map(|((c, e), items)| message(|out| written(
            ListWriter::located(out, c, e),
            items
        ))),
        (call, named).prop_map(|((c, e), items)| message(|out| written(
            ListWriter::names(out, c, e, c),
            items
        ))),
        (call, listed).prop_map(|((c, e), items)| message(|out| written(
            ListWriter::entries(out, c, e),
            items
        ))),
    ]
}

fn messages() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        requests().prop_map(|message| request(&message)),
        replies().prop_map(|message| reply(&message)),
        lists(),
    ]
}

fn encode(header: &Header, body: &Body<'_>, out: &mut [u8]) -> Option<usize> {
    match body {
        Body::Request(request) => encode_request(header, request, out),
        Body::Reply(reply) => encode_reply(header, reply, out),
    }
}

/// Decodes `bytes`; if they are a message, encodes it and makes sure that the bytes are the same.
fn is_canonical(bytes: &[u8]) -> bool {
    let Ok((header, body)) = decode(bytes) else {
        return false;
    };
    let mut out = [0xaa; MESSAGE_SIZE];
    let len = encode(&header, &body, &mut out).unwrap();
    assert_eq!(&out[..len], bytes);
    true
}

proptest! {
    #[test]
    fn requests_round_trip(message in requests(), call: u64, epoch: u64, floor: u64) {
        let header = Header { kind: Kind::Request, call, epoch, floor };
        let mut out = [0xaa; 200];
        let len = encode_request(&header, &message, &mut out).unwrap();
        prop_assert_eq!(decode(&out[..len]), Ok((header, Body::Request(message))));
    }

    #[test]
    fn replies_round_trip(message in replies(), call: u64, epoch: u64, floor: u64) {
        let header = Header { kind: Kind::Reply, call, epoch, floor };
        let mut out = [0xaa; 200];
        let len = encode_reply(&header, &message, &mut out).unwrap();
        prop_assert_eq!(decode(&out[..len]), Ok((header, Body::Reply(message))));
    }

    #[test]
    fn addresses_round_trip(items in prop::collection::vec(any::<u64>(), 0..124), call: u64, epoch: u64) {
        let mut out = [0xaa; MESSAGE_SIZE];
        let len = written(ListWriter::addresses(&mut out, call, epoch), items.clone());
        let (header, body) = decode(&out[..len]).unwrap();
        prop_assert_eq!(header, Header { kind: Kind::Reply, call, epoch, floor: 0 });
        let Body::Reply(Reply::Addresses(list)) = body else { panic!("{body:?}") };
        prop_assert_eq!(list.len(), items.len());
        prop_assert_eq!(list.collect::<Vec<_>>(), items);
    }

    #[test]
    fn located_round_trip(items in prop::collection::vec(places(), 0..50)) {
        let mut out = [0xaa; MESSAGE_SIZE];
        let len = written(ListWriter::located(&mut out, 1, 2), items.clone());
        let (_, body) = decode(&out[..len]).unwrap();
        let Body::Reply(Reply::Located(list)) = body else { panic!("{body:?}") };
        prop_assert_eq!(list.collect::<Vec<_>>(), items);
    }

    #[test]
    fn entries_round_trip(items in prop::collection::vec(entries(), 0..12), next: u64, late: bool) {
        let mut out = [0xaa; MESSAGE_SIZE];
        let mut writer = ListWriter::entries(&mut out, 1, 2);
        if !late {
            writer.set_cursor(next);
        }
        for item in &items {
            prop_assert!(writer.push(*item));
        }
        if late {
            writer.set_cursor(next);
        }
        let len = writer.finish();
        let (_, body) = decode(&out[..len]).unwrap();
        let Body::Reply(Reply::Listed { cursor, entries }) = body else { panic!("{body:?}") };
        prop_assert_eq!((cursor, entries.collect::<Vec<_>>()), (next, items));
    }

    #[test]
    fn sync_round_trips(
        items in prop::collection::vec((names(), any::<u64>()), 0..14), of: u64, end: bool,
    ) {
        let mut out = [0xaa; MESSAGE_SIZE];
        let mut writer = ListWriter::names(&mut out, 1, 2, of);
        writer.set_last(end);
        let len = written(writer, items.clone());
        let (header, body) = decode(&out[..len]).unwrap();
        prop_assert_eq!(header, Header { kind: Kind::Request, call: 1, epoch: 2, floor: 0 });
        let Body::Request(Request::Sync { epoch, last, names }) = body else { panic!("{body:?}") };
        prop_assert_eq!((epoch, last, names.collect::<Vec<_>>()), (of, end, items));
    }

    #[test]
    fn messages_are_canonical(bytes in messages()) {
        prop_assert!(is_canonical(&bytes));
    }

    #[test]
    fn no_other_length_is_taken(bytes in messages(), len in 0usize..300, tail: u8) {
        let mut other = bytes.clone();
        other.resize(len, tail);
        prop_assert_eq!(decode(&other).is_ok(), len == bytes.len());
        // Nor when the length is stated in agreement, if the body has no list.
        if len >= HEADER_SIZE && len != bytes.len() {
            other[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            let list = matches!((bytes[1], bytes[2]), (1, 13 | 26 | 29 | 30) | (2, 3 | 6 | 7));
            prop_assert!(!is_canonical(&other) || list);
        }
    }

    #[test]
    fn another_stated_length_is_not_taken(mut bytes in messages(), stated: u32) {
        prop_assume!(stated as usize != bytes.len());
        bytes[4..8].copy_from_slice(&stated.to_le_bytes());
        prop_assert_eq!(decode(&bytes), Err(Malformed));
    }

    #[test]
    fn short_buffers_are_refused(bytes in messages(), cut: prop::sample::Index) {
        let (header, body) = decode(&bytes).unwrap();
        let mut out = vec![0xaa; cut.index(bytes.len())];
        prop_assert_eq!(encode(&header, &body, &mut out), None);
    }

    #[test]
    fn flipped_bits_never_panic(mut bytes in messages(), at: prop::sample::Index, bit in 0u8..8) {
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        is_canonical(&bytes);
    }

    #[test]
    fn noise_is_no_message(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        prop_assert_eq!(decode(&bytes), Err(Malformed));
    }

    #[test]
    fn noise_behind_a_good_header_never_panics(
        kind in 1u8..3, number in 0u8..25, body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let len = (HEADER_SIZE + body.len()) as u8;
        let mut bytes = vec![VERSION, kind, number, 0, len, 0, 0, 0];
        bytes.resize(HEADER_SIZE, 7);
        bytes.extend(body);
        is_canonical(&bytes);
    }
}
