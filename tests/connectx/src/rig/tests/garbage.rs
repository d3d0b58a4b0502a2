// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Arbitrary input of a driver: the device and the other devices continue to work.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::firmware;
use crate::layout::put_be;

/// Checks that two other queue pairs work.
fn assert_works(pair: &mut Pair) {
    let cqs = [0, 1].map(|node| pair.rig.cq(node, 4));
    let qps = [0, 1].map(|node| pair.rig.qp(node, &Spec::new(Transport::Rc, cqs[node])));
    pair.rig.connect(&qps[0], &qps[1], &Options::default());
    let mrs = [0, 1].map(|node| pair.rig.mr(node, 4096));
    let (mut qp, mut cq) = (qps[0], cqs[0]);
    pair.rig.post(
        &mut qp,
        &WorkRequest::write(&mrs[1], 0).local(&mrs[0], 0, 100),
    );
    pair.rig.run();
    assert!(pair.rig.expect(&mut cq).is_done());
}

fn transport() -> impl Strategy<Value = Transport> {
    prop_oneof![
        Just(Transport::Rc),
        Just(Transport::Uc),
        Just(Transport::Ud),
        Just(Transport::Umr),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn arbitrary_wqe_does_not_affect_others(
        transport in transport(),
        bytes in prop::collection::vec(any::<u8>(), 64..1024),
        opcode in 0..0x30u8, units in 0..64u8,
    ) {
        let mut pair = Pair::new(transport, &Options::default());
        let mut bytes = bytes;
        // Without a valid control segment, all work requests would be rejected early.
        put_be(&mut bytes, 0, 4, u64::from(opcode));
        let qpn = u64::from(pair.qps[0].number);
        put_be(&mut bytes, 4, 4, (qpn << 8) | u64::from(units));
        pair.rig.post_raw(&mut pair.qps[0], &bytes);
        let qp = pair.qps[0];
        pair.rig.ring(&qp, 0);
        pair.rig.advance_time(Duration::from_secs(10));
        assert_works(&mut pair);
    }

    #[test]
    fn arbitrary_doorbell_does_not_affect_others(bytes: [u8; 8], posted in 0..100u16) {
        let mut pair = Pair::reliable();
        let work = pair.local(WorkRequest::write(&pair.mrs[1], 0), 8);
        for _ in 0..posted {
            pair.rig.post_without_doorbell(&mut pair.qps[0], &work);
        }
        let mut aimed = bytes;
        let qpn = u64::from(pair.qps[0].number);
        put_be(&mut aimed, 4, 4, qpn << 8);
        let qp = pair.qps[0];
        pair.rig.ring_with(&qp, &bytes);
        pair.rig.ring_with(&qp, &aimed);
        pair.rig.advance_time(Duration::from_secs(10));
        assert_works(&mut pair);
    }

    #[test]
    fn arbitrary_receive_does_not_affect_others(
        pieces in prop::collection::vec((any::<u32>(), 0..100u64, any::<u32>()), 0..4),
        length in 0..20_000u32,
    ) {
        let mut pair = Pair::reliable();
        let mr = pair.mrs[1];
        let pieces: Vec<_> = pieces
            .into_iter()
            .map(|(key, offset, length)| {
                let key = if key % 2 == 0 { mr.key } else { key };
                (Mr { key, ..mr }, offset, length)
            })
            .collect();
        pair.rig.receive(&mut pair.qps[1], &pieces);
        let work = pair.local(WorkRequest::send(), length.max(1));
        pair.rig.post(&mut pair.qps[0], &work);
        pair.rig.advance_time(Duration::from_secs(1));
        assert_works(&mut pair);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn arbitrary_command_does_not_affect_others(
        opcodes in prop::collection::vec(any::<prop::sample::Index>(), 8),
        bytes in prop::collection::vec(any::<u8>(), 8..600),
        sparse: bool, output in 16..2000usize,
    ) {
        let known: Vec<u16> = (0..0x1000).filter(|op| firmware::handler(*op).is_some()).collect();
        let mut rig = Rig::new(1);
        for opcode in opcodes {
            let mut input = bytes.clone();
            if sparse {
                // Small numbers, which are those of existing objects.
                input.iter_mut().for_each(|byte| *byte &= 0x41);
            }
            put_be(&mut input, 0, 2, u64::from(known[opcode.index(known.len())]));
            let _ = rig.command(0, &input, output);
        }
        rig.advance_time(Duration::from_secs(1));
    }
}
