// SPDX-License-Identifier: GPL-2.0

//! Property tests of all control messages.
//!
//! Messages round trip, other lengths are rejected, and accepted bytes equal the output of an encoder.

use super::{
    strategies::{
        chunk_addrs, chunk_locations, messages, named_regions, region_infos, replies, requests,
        write_list,
    },
    *,
};
use proptest::prelude::*;

fn encode(header: &ControlHeader, body: &ControlBody<'_>, out: &mut [u8]) -> Option<usize> {
    match body {
        ControlBody::Request(request) => encode_request(header, request, out),
        ControlBody::Reply(reply) => encode_reply(header, reply, out),
    }
}

/// Returns `true` if `bytes` are a message. Asserts that encoding the message again yields the same bytes.
fn reencodes_to_same_bytes(bytes: &[u8]) -> bool {
    let Ok((header, body)) = decode_control(bytes) else {
        return false;
    };
    let mut out = [0xaa; MAX_CONTROL_BYTES];
    let len = encode(&header, &body, &mut out).unwrap();
    assert_eq!(&out[..len], bytes);
    true
}

proptest! {
    #[test]
    fn requests_round_trip(message in requests(), request_id: u64, epoch: u64, low_watermark: u64) {
        let header = ControlHeader { kind: ControlKind::Request, request_id, epoch, low_watermark };
        let mut out = [0xaa; 200];
        let len = encode_request(&header, &message, &mut out).unwrap();
        prop_assert_eq!(decode_control(&out[..len]), Ok((header, ControlBody::Request(message))));
    }

    #[test]
    fn replies_round_trip(message in replies(), request_id: u64, epoch: u64, low_watermark: u64) {
        let header = ControlHeader { kind: ControlKind::Reply, request_id, epoch, low_watermark };
        let mut out = [0xaa; 200];
        let len = encode_reply(&header, &message, &mut out).unwrap();
        prop_assert_eq!(decode_control(&out[..len]), Ok((header, ControlBody::Reply(message))));
    }

    #[test]
    fn addresses_round_trip(items in prop::collection::vec(chunk_addrs(), 0..124), request_id: u64, epoch: u64) {
        let mut out = [0xaa; MAX_CONTROL_BYTES];
        let len = write_list(ListWriter::addresses(&mut out, request_id, epoch), items.clone());
        let (header, body) = decode_control(&out[..len]).unwrap();
        prop_assert_eq!(header, ControlHeader { kind: ControlKind::Reply, request_id, epoch, low_watermark: 0 });
        let ControlBody::Reply(ControlReply::Addresses(list)) = body else { panic!("{body:?}") };
        prop_assert_eq!(list.len(), items.len());
        prop_assert_eq!(list.collect::<Vec<_>>(), items);
    }

    #[test]
    fn chunk_locations_round_trip(items in prop::collection::vec(chunk_locations(), 0..50)) {
        let mut out = [0xaa; MAX_CONTROL_BYTES];
        let len = write_list(ListWriter::chunk_locations(&mut out, 1, 2), items.clone());
        let (_, body) = decode_control(&out[..len]).unwrap();
        let ControlBody::Reply(ControlReply::Located(list)) = body else { panic!("{body:?}") };
        prop_assert_eq!(list.collect::<Vec<_>>(), items);
    }

    #[test]
    fn region_infos_round_trip(items in prop::collection::vec(region_infos(), 0..10), next_cursor: u64, set_cursor_last: bool) {
        let mut out = [0xaa; MAX_CONTROL_BYTES];
        let mut writer = ListWriter::regions(&mut out, 1, 2);
        if !set_cursor_last {
            writer.set_cursor(next_cursor);
        }
        for item in &items {
            prop_assert!(writer.push(*item));
        }
        if set_cursor_last {
            writer.set_cursor(next_cursor);
        }
        let len = writer.finish();
        let (_, body) = decode_control(&out[..len]).unwrap();
        let ControlBody::Reply(ControlReply::Listed { cursor, entries }) = body else { panic!("{body:?}") };
        prop_assert_eq!((cursor, entries.collect::<Vec<_>>()), (next_cursor, items));
    }

    #[test]
    fn sync_names_round_trips(
        items in prop::collection::vec(named_regions(), 0..12), synced_epoch: u64, is_last: bool,
    ) {
        let mut out = [0xaa; MAX_CONTROL_BYTES];
        let mut writer = ListWriter::names(&mut out, 1, 2, synced_epoch);
        writer.set_last(is_last);
        let len = write_list(writer, items.clone());
        let (header, body) = decode_control(&out[..len]).unwrap();
        prop_assert_eq!(header, ControlHeader { kind: ControlKind::Request, request_id: 1, epoch: 2, low_watermark: 0 });
        let ControlBody::Request(ControlRequest::SyncNames { epoch, is_last, names }) = body else { panic!("{body:?}") };
        prop_assert_eq!((epoch, is_last, names.collect::<Vec<_>>()), (synced_epoch, is_last, items));
    }

    #[test]
    fn decoded_messages_reencode_to_the_same_bytes(bytes in messages()) {
        prop_assert!(reencodes_to_same_bytes(&bytes));
    }

    #[test]
    fn message_of_wrong_length_is_malformed(bytes in messages(), len in 0usize..300, tail: u8) {
        let mut other = bytes.clone();
        other.resize(len, tail);
        prop_assert_eq!(decode_control(&other).is_ok(), len == bytes.len());
        // A matching length field helps only a message with a list.
        if len >= CONTROL_HEADER_SIZE && len != bytes.len() {
            other[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            let list = matches!((bytes[1], bytes[2]), (1, 13 | 26 | 29 | 30) | (2, 3 | 6 | 7));
            prop_assert!(!reencodes_to_same_bytes(&other) || list);
        }
    }

    #[test]
    fn message_with_wrong_length_field_is_malformed(mut bytes in messages(), stated: u32) {
        prop_assume!(stated as usize != bytes.len());
        bytes[4..8].copy_from_slice(&stated.to_le_bytes());
        prop_assert_eq!(decode_control(&bytes), Err(Malformed));
    }

    #[test]
    fn encode_into_a_short_buffer_fails(bytes in messages(), cut: prop::sample::Index) {
        let (header, body) = decode_control(&bytes).unwrap();
        let mut out = vec![0xaa; cut.index(bytes.len())];
        prop_assert_eq!(encode(&header, &body, &mut out), None);
    }

    #[test]
    fn decode_of_flipped_bits_never_panics(mut bytes in messages(), at: prop::sample::Index, bit in 0u8..8) {
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        reencodes_to_same_bytes(&bytes);
    }

    #[test]
    fn random_bytes_are_malformed(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        prop_assert_eq!(decode_control(&bytes), Err(Malformed));
    }

    #[test]
    fn random_body_after_a_valid_header_never_panics(
        kind in 1u8..3, number in 0u8..25, body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let len = (CONTROL_HEADER_SIZE + body.len()) as u8;
        let mut bytes = vec![VERSION, kind, number, 0, len, 0, 0, 0];
        bytes.resize(CONTROL_HEADER_SIZE, 7);
        bytes.extend(body);
        reencodes_to_same_bytes(&bytes);
    }
}
