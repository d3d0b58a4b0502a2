// SPDX-License-Identifier: GPL-2.0

//! Tests of the parent module: the exact bytes, and properties of all datagrams.

use super::*;
use proptest::prelude::*;

const SAMPLE: Setup = Setup {
    kind: SetupKind::Accept,
    secret: *b"0123456789abcdef",
    from: 1,
    to: 0xfffe,
    from_incarnation: 0x1122,
    to_incarnation: 0x3344,
    index: 3,
    pairs: 4,
    generation: 9,
    qpn: 0xabcdef,
    psn: 0x123456,
    rkey: 0xdead_beef,
    mtu: 4096,
    rd_atomic: 16,
    epoch: 0x5566,
};

fn bytes(setup: &Setup) -> [u8; SETUP_SIZE] {
    let mut out = [0xaa; SETUP_SIZE];
    assert_eq!(setup.encode(&mut out), Some(SETUP_SIZE));
    out
}

prop_compose! {
    fn setups()(
        kind in 1u8..9, secret: [u8; 16], from in 1u32..65536, to in 1u32..65536,
        from_incarnation: u64, to_incarnation: u64,
        (index, pairs) in (1u8..=255).prop_flat_map(|pairs| (0..pairs, Just(pairs))),
        generation: u32,
        (qpn, psn) in (0u32..1 << 24, 0u32..1 << 24),
        rkey: u32, mtu in 8u16..13, rd_atomic: u8, epoch: u64,
    ) -> Setup {
        let (kind, mtu) = (SetupKind::from_number(kind).unwrap(), 1 << mtu);
        Setup {
            kind, secret, from, to, from_incarnation, to_incarnation, index, pairs, generation, qpn,
            psn, rkey, mtu, rd_atomic, epoch,
        }
    }
}

#[test]
fn bytes_never_change() {
    let expected =
        b"\x01\x02\x03\x04\x01\0\0\0\xfe\xff\0\0\x09\0\0\0\x22\x11\0\0\0\0\0\0\x44\x33\0\0\0\0\0\0\
        \xef\xcd\xab\0\x56\x34\x12\0\xef\xbe\xad\xde\0\x10\x10\x000123456789abcdef\x66\x55\0\0\0\0\0\0";
    assert_eq!(&bytes(&SAMPLE), expected);
}

#[test]
fn debug_keeps_secrets() {
    let text = format!("{SAMPLE:?} {SAMPLE:#?}");
    let (rkey, first) = (format!("{}", SAMPLE.rkey), "48, 49");
    assert!(text.contains("from: 1,") && text.contains("Accept"));
    for hidden in ["secret", "rkey", "deadbeef", "0123", first, &rkey] {
        assert!(!text.contains(hidden), "{hidden} in {text}");
    }
}

#[test]
fn fields_out_of_range_are_refused() {
    let cases: [fn(&mut Setup); 11] = [
        |s| s.from = 0,
        |s| s.from = 65536,
        |s| s.to = 0,
        |s| s.to = u32::MAX,
        |s| s.index = s.pairs,
        |s| s.pairs = 0,
        |s| s.qpn = 1 << 24,
        |s| s.psn = 1 << 24,
        |s| s.mtu = 128,
        |s| s.mtu = 1500,
        |s| s.mtu = 8192,
    ];
    for (i, spoil) in cases.iter().enumerate() {
        let mut setup = SAMPLE;
        spoil(&mut setup);
        assert_eq!(setup.encode(&mut [0; 100]), None, "case {i}");
    }
}

#[test]
fn mtu_may_lack_only_where_it_has_no_use() {
    for (number, good) in [(1, false), (2, false), (3, true)] {
        let kind = SetupKind::from_number(number).unwrap();
        let setup = Setup {
            kind,
            mtu: 0,
            ..SAMPLE
        };
        assert_eq!(
            setup.encode(&mut [0; SETUP_SIZE]).is_some(),
            good,
            "{kind:?}"
        );
    }
}

#[test]
fn odd_headers_are_malformed() {
    for (at, value) in [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 9),
        (47, 1),
        (3, 3),
        (7, 1),
        (35, 1),
        (39, 1),
        (45, 0),
    ] {
        let mut bytes = bytes(&SAMPLE);
        bytes[at] = value;
        assert_eq!(Setup::decode(&bytes), Err(Malformed), "{value} at {at}");
    }
}

proptest! {
    #[test]
    fn round_trips(setup in setups()) {
        prop_assert_eq!(Setup::decode(&bytes(&setup)), Ok(setup));
    }

    #[test]
    fn no_other_length_is_taken(setup in setups(), len in 0usize..130) {
        let mut message = bytes(&setup).to_vec();
        message.resize(len, 0);
        prop_assert_eq!(Setup::decode(&message).is_ok(), len == SETUP_SIZE);
    }

    #[test]
    fn short_buffers_are_refused(setup in setups(), len in 0..SETUP_SIZE) {
        prop_assert_eq!(setup.encode(&mut [0; SETUP_SIZE][..len]), None);
    }

    #[test]
    fn what_is_taken_is_canonical(mut noise: [u8; 32], tail: [u8; 32], kind in 0u8..6, mend: bool) {
        (noise[0], noise[1]) = (VERSION, kind);
        let mut message = [noise, tail].concat();
        if mend {
            for at in [6, 7, 10, 11, 35, 39, 44] {
                message[at] = 0;
            }
            message[45] &= 16;
        }
        if let Ok(setup) = Setup::decode(&message) {
            prop_assert_eq!(&bytes(&setup)[..], &message[..]);
        }
    }
}
