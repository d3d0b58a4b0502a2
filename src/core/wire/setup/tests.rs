// SPDX-License-Identifier: GPL-2.0

//! Tests of setup datagrams: exact encodings, authentication, and property tests.

use super::*;
use proptest::prelude::*;

const SAMPLE: SetupDatagram = SetupDatagram {
    kind: SetupKind::Accept,
    from_node: 1,
    to_node: 0xfffe,
    from_incarnation: 0x1122,
    to_incarnation: 0x3344,
    admission: 0x77,
    conn_index: 3,
    conns_per_peer: 4,
    generation: 9,
    qpn: 0xabcdef,
    psn: 0x123456,
    rkey: 0xdead_beef,
    mtu: 4096,
    rd_atomic: 16,
    epoch: 0x5566,
};

/// Code of the tests in place of an HMAC: XOR of the covered bytes, a block of 16 bytes at a time, from a key.
fn checksum(covered: &CoveredBytes) -> AuthCode {
    let mut code = *b"0123456789abcdef";
    for (at, byte) in covered.iter().enumerate() {
        code[at % AUTH_CODE_BYTES] ^= byte;
    }
    code
}

fn encoded(setup: &SetupDatagram) -> [u8; SETUP_SIZE] {
    setup.encode(checksum).unwrap()
}

fn verified(bytes: &[u8]) -> Result<SetupDatagram, Malformed> {
    UnverifiedSetup::new(bytes)?.verify(|covered, code| checksum(covered) == *code)
}

/// Decodes a datagram as if its code were right.
fn unauthenticated(bytes: &[u8]) -> Result<SetupDatagram, Malformed> {
    UnverifiedSetup::new(bytes)?.verify(|_, _| true)
}

prop_compose! {
    fn setups()(
        kind in 1u8..9, from_node in 1u32..65536, to_node in 1u32..65536,
        from_incarnation: u64, to_incarnation: u64, admission: u64,
        (conn_index, conns_per_peer) in (1u8..=255).prop_flat_map(|conns_per_peer| (0..conns_per_peer, Just(conns_per_peer))),
        generation: u32,
        (qpn, psn) in (0u32..1 << 24, 0u32..1 << 24),
        rkey: u32, mtu in 8u16..13, rd_atomic: u8, epoch: u64,
    ) -> SetupDatagram {
        let (kind, mtu) = (SetupKind::from_code(kind).unwrap(), 1 << mtu);
        SetupDatagram {
            kind, from_node, to_node, from_incarnation, to_incarnation, admission, conn_index, conns_per_peer,
            generation, qpn, psn, rkey, mtu, rd_atomic, epoch,
        }
    }
}

#[test]
fn encoding_of_known_datagram_never_changes() {
    let expected =
        b"\x04\x02\x03\x04\x01\0\0\0\xfe\xff\0\0\x09\0\0\0\x22\x11\0\0\0\0\0\0\x44\x33\0\0\0\0\0\0\
        \x77\0\0\0\0\0\0\0\xef\xcd\xab\0\x56\x34\x12\0\xef\xbe\xad\xde\0\x10\x10\x000123456789abcdef\x66\x55\0\0\0\0\0\0";
    assert_eq!(
        SAMPLE.encode(|_| *b"0123456789abcdef").as_ref(),
        Some(expected)
    );
}

#[test]
fn debug_output_omits_the_remote_key() {
    let text = format!("{SAMPLE:?} {SAMPLE:#?}");
    let rkey = format!("{}", SAMPLE.rkey);
    assert!(text.contains("from: 1,") && text.contains("Accept"));
    for hidden in ["rkey", "deadbeef", &rkey] {
        assert!(!text.contains(hidden), "{hidden} in {text}");
    }
}

#[test]
fn datagram_with_out_of_range_field_is_not_encoded() {
    let cases: [fn(&mut SetupDatagram); 11] = [
        |s| s.from_node = 0,
        |s| s.from_node = 65536,
        |s| s.to_node = 0,
        |s| s.to_node = u32::MAX,
        |s| s.conn_index = s.conns_per_peer,
        |s| s.conns_per_peer = 0,
        |s| s.qpn = 1 << 24,
        |s| s.psn = 1 << 24,
        |s| s.mtu = 128,
        |s| s.mtu = 1500,
        |s| s.mtu = 8192,
    ];
    for (i, corrupt) in cases.iter().enumerate() {
        let mut setup = SAMPLE;
        corrupt(&mut setup);
        assert_eq!(setup.encode(checksum), None, "case {i}");
    }
}

#[test]
fn zero_mtu_is_accepted_only_in_a_connect_request() {
    for (code, is_accepted) in [(1, false), (2, false), (3, true)] {
        let kind = SetupKind::from_code(code).unwrap();
        let setup = SetupDatagram {
            kind,
            mtu: 0,
            ..SAMPLE
        };
        assert_eq!(setup.encode(checksum).is_some(), is_accepted, "{kind:?}");
    }
}

#[test]
fn invalid_header_is_malformed() {
    for (at, value) in [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 9),
        (55, 1),
        (3, 3),
        (7, 1),
        (43, 1),
        (47, 1),
        (53, 0),
    ] {
        let mut bytes = encoded(&SAMPLE);
        bytes[at] = value;
        assert_eq!(unauthenticated(&bytes), Err(Malformed), "{value} at {at}");
    }
}

#[test]
fn code_covers_all_bytes_of_the_datagram_but_itself() {
    let bytes: [u8; SETUP_SIZE] = core::array::from_fn(|at| at as u8);
    let received = UnverifiedSetup::new(&bytes).unwrap();
    let _ = received.verify(|covered, code| {
        assert_eq!(covered[..], [&bytes[..56], &bytes[72..]].concat());
        assert_eq!(code[..], bytes[56..72]);
        false
    });
}

#[test]
fn authentic_datagram_is_decoded_and_forged_one_is_malformed() {
    let bytes = encoded(&SAMPLE);
    let received = UnverifiedSetup::new(&bytes).unwrap();
    assert_eq!(received.verify(|_, _| true), Ok(SAMPLE));
    assert_eq!(received.verify(|_, _| false), Err(Malformed));
}

proptest! {
    #[test]
    fn datagrams_round_trip(setup in setups()) {
        let bytes = encoded(&setup);
        prop_assert_eq!(verified(&bytes), Ok(setup));
        prop_assert_eq!(UnverifiedSetup::new(&bytes).unwrap().claimed_sender(), setup.from_node);
    }

    #[test]
    fn datagram_with_a_changed_bit_is_malformed(setup in setups(), bit in 0..SETUP_SIZE * 8) {
        let mut bytes = encoded(&setup);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(verified(&bytes), Err(Malformed));
    }

    #[test]
    fn datagram_of_wrong_length_is_malformed(setup in setups(), len in 0usize..130) {
        let mut message = encoded(&setup).to_vec();
        message.resize(len, 0);
        prop_assert_eq!(verified(&message).is_ok(), len == SETUP_SIZE);
    }

    #[test]
    fn decoded_datagram_reencodes_to_the_same_bytes(mut noise: [u8; 32], tail: [u8; 32], end: [u8; 16], kind in 0u8..6, clear_reserved: bool) {
        (noise[0], noise[1]) = (VERSION, kind);
        let mut message = [&noise[..], &tail, &end].concat();
        if clear_reserved {
            for at in [6, 7, 10, 11, 43, 47, 52] {
                message[at] = 0;
            }
            message[53] &= 16;
        }
        if let Ok(setup) = unauthenticated(&message) {
            let code = message[56..72].try_into().unwrap();
            prop_assert_eq!(&setup.encode(|_| code).unwrap()[..], &message[..]);
        }
    }
}
