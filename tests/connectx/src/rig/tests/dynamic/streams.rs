// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Streams of a DC initiator.

use std::time::Duration;

use super::*;
use crate::firmware::Status;
use crate::layout::{put_be, set};
use crate::network::plan::{Plan, Rule};

/// Offset of the parameters of the extension that resets a stream.
const EXTENSION: usize = 0x108;

/// Eight channels; the queue pair fails when the fourth stream does.
const STREAMS: (u32, u32) = (3, 2);

impl Star {
    /// Posts a WRITE of a stream with a wrong local key, or a wrong key at the target.
    fn fail(&mut self, stream: u16, at_target: bool) -> u16 {
        let (mut own, mut peer) = (self.mr, self.targets[0].mr);
        let key = if at_target {
            &mut peer.key
        } else {
            &mut own.key
        };
        *key ^= 1;
        let work = WorkRequest::write(&peer, 0).local(&own, 0, 8);
        self.post(0, work.stream(stream))
    }

    /// Returns counter and error of each completion.
    fn completions(&mut self) -> Vec<(u16, Option<u32>)> {
        self.rig.run();
        let all = self.rig.drain(&mut self.cq);
        let error = |cqe: &Cqe| (!cqe.is_done()).then_some(cqe.syndrome);
        all.iter().map(|cqe| (cqe.counter, error(cqe))).collect()
    }

    fn is_in_error(&mut self) -> bool {
        let dci = self.dci;
        self.rig.is_in_error(&dci)
    }
}

fn star(streams: (u32, u32)) -> Star {
    Star::with(&Options::default(), streams)
}

const PROTECTION: Option<u32> = Some(Syndrome::LocalProtection as u32);
const ACCESS: Option<u32> = Some(Syndrome::RemoteAccess as u32);
const FLUSH: Option<u32> = Some(Syndrome::Flush as u32);

#[test]
fn failure_affects_one_stream_only() {
    for (at_target, error) in [(false, PROTECTION), (true, ACCESS)] {
        let mut star = star(STREAMS);
        let posted = [
            (star.write(0, 2), None),
            (star.fail(1, at_target), error),
            (star.write(0, 1), FLUSH),
            (star.write(0, 2), None),
            (star.write(1, 1), FLUSH),
        ];
        assert_eq!(star.completions(), posted);
        assert!(!star.is_in_error());
    }
}

#[test]
fn started_requests_after_failure_are_flushed() {
    let mut star = star(STREAMS);
    // All requests begin before the first response.
    let target = star.targets[0].mr;
    let (own, bad) = (star.mr, Mr { key: 0, ..target });
    let mut posted = Vec::new();
    for (mr, error) in [(target, None), (bad, ACCESS), (target, FLUSH)] {
        let work = WorkRequest::write(&mr, 0).local(&own, 0, 3000).stream(1);
        let work = star.to(0, KEY, work);
        posted.push((star.rig.post_without_doorbell(&mut star.dci, &work), error));
        let other = WorkRequest::write(&target, 0)
            .local(&own, 0, 3000)
            .stream(2);
        let other = star.to(0, KEY, other);
        posted.push((star.rig.post_without_doorbell(&mut star.dci, &other), None));
    }
    let dci = star.dci;
    star.rig.ring(&dci, posted[5].0);
    assert_eq!(star.completions(), posted);
}

#[test]
fn failed_stream_continues_after_reset() {
    let mut star = star(STREAMS);
    let dci = star.dci;
    for round in 0..10 {
        star.fail(1, round % 2 == 0);
        star.completions();
        assert!(
            star.rig.reset_stream(&dci, 2).is_err(),
            "reset of a working stream"
        );
        star.rig.reset_stream(&dci, 1).unwrap();
        assert!(
            star.rig.reset_stream(&dci, 1).is_err(),
            "second reset of a stream"
        );
        let index = star.write(0, 1);
        assert_eq!(star.completions(), [(index, None)]);
    }
}

#[test]
fn stream_reset_with_other_changes_is_rejected() {
    const Q_KEY: u32 = 1 << 5;
    type Change = fn(&mut Vec<u8>);
    let bad: [(Change, Status); 6] = [
        (
            |input| set!(input, rts2rts_qp_in, opt_param_mask, Q_KEY),
            Status::BadParameter,
        ),
        (
            |input| set!(input, rts2rts_qp_in, opcode, MLX5_CMD_OP_RTR2RTS_QP),
            Status::BadParameter,
        ),
        (|input| put_be(input, EXTENSION, 8, 0), Status::BadParameter),
        (|input| put_be(input, EXTENSION, 8, 3), Status::BadParameter),
        (|input| input.truncate(EXTENSION), Status::BadParameter),
        (
            |input| input.truncate(EXTENSION - 9),
            Status::BadInputLength,
        ),
    ];
    let mut star = star(STREAMS);
    star.fail(1, false);
    star.completions();
    let good = encode_stream_reset(&star.dci, 1);
    for (change, status) in bad {
        let mut input = good.clone();
        change(&mut input);
        assert_eq!(star.rig.command(0, &input, 16), Err(status as u8));
    }
    star.rig.command(0, &good, 16).unwrap();
}

#[test]
fn qp_fails_after_too_many_failed_streams() {
    let mut star = star(STREAMS);
    for stream in 1..4 {
        star.fail(stream, false);
        // Another failure of the same stream does not count.
        star.fail(stream, false);
        star.completions();
        assert!(!star.is_in_error());
    }
    let index = star.fail(4, false);
    assert_eq!(star.completions(), [(index, PROTECTION)]);
    assert!(star.is_in_error());
    let index = star.write(0, 5);
    assert_eq!(star.completions(), [(index, FLUSH)]);
    // A reset of the queue pair resets all streams.
    star.rig.reset(&mut star.dci);
    let dci = star.dci;
    star.rig.connect_to(&dci, 0, 0, &Options::default());
    let index = star.write(0, 1);
    assert_eq!(star.completions(), [(index, None)]);
}

#[test]
fn malformed_wqe_fails_qp_with_streams() {
    let mut star = star(STREAMS);
    star.post(0, WorkRequest::new(0x3f).stream(1));
    star.rig.run();
    assert!(star.is_in_error());
}

#[test]
fn stream_does_not_wait_for_dct_of_other_stream() {
    for (streams, waits) in [((0, 0), true), (STREAMS, false)] {
        let mut star = star(streams);
        let own = star.mr;
        star.rig.write(0, own.address, &[7; 8]);
        // No receive is posted for the message.
        let send = star.post(0, WorkRequest::send().local(&own, 0, 8).stream(1));
        let write = star.write(1, 2);
        star.rig.advance_time(Duration::from_millis(2));
        let peer = star.targets[1].mr;
        let written = star.rig.read(2, peer.address + 16, 8);
        assert_eq!(written == [7; 8], !waits);
        assert_eq!(star.completions(), []);
        star.receive(0);
        star.rig.advance_time(Duration::from_millis(2));
        // Completions are in order: for the driver, a completion ends all earlier requests.
        assert_eq!(star.completions(), [(send, None), (write, None)]);
    }
}

#[test]
fn strong_ordering_applies_within_stream() {
    let mut star = star(STREAMS);
    let (own, peer) = (star.mr, star.targets[1].mr);
    star.rig.write(0, own.address, &[7; 8]);
    // No receive is posted for the message, so no request completes.
    star.post(0, WorkRequest::send().local(&own, 0, 8).stream(1));
    star.write(1, 2);
    let work = WorkRequest::write(&peer, 0)
        .local(&own, 0, 8)
        .strongly_ordered();
    star.post(1, work.stream(2));
    star.rig.advance_time(Duration::from_millis(2));
    assert_eq!(star.rig.read(2, peer.address, 8), [7; 8]);
}

#[test]
fn streams_share_channels() {
    let mut star = star((1, 1));
    let own = star.mr;
    let posted: Vec<_> = (0..20u16)
        .map(|at| {
            let stream = at % 5;
            let peer = star.targets[usize::from(at % 2)].mr;
            let work = WorkRequest::write(&peer, u64::from(stream) * 8)
                .local(&own, 0, 8)
                .stream(stream);
            let work = star.to(usize::from(at % 2), KEY, work);
            (star.rig.post_without_doorbell(&mut star.dci, &work), None)
        })
        .collect();
    let dci = star.dci;
    star.rig.ring(&dci, posted[19].0);
    assert_eq!(star.completions(), posted);
}

#[test]
fn stream_keeps_order_on_lossy_network() {
    let mut star = star(STREAMS);
    let (own, rules) = (
        star.mr,
        vec![Rule {
            drop: 0.1,
            duplicate: 0.05,
            reorder: 0.1,
            ..Rule::default()
        }],
    );
    star.rig
        .fabric
        .network
        .set_plan(Plan { seed: 3, rules })
        .unwrap();
    let peer = star.targets[0].mr;
    let mut posted = Vec::new();
    for round in 0..20u64 {
        let at = round * 3000;
        star.rig.write(0, own.address + at, &[round as u8; 3000]);
        let stream = (round % 3) as u16;
        let offset = u64::from(stream) * 3000;
        let work = WorkRequest::write(&peer, offset).local(&own, at, 3000);
        posted.push((star.post(0, work.stream(stream)), None));
    }
    star.rig.advance_time(Duration::from_secs(60));
    assert_eq!(star.completions(), posted);
    // Memory has the data of the last request of each stream.
    for (stream, last) in [(0, 18), (1, 19), (2, 17)] {
        let memory = star.rig.read(1, peer.address + stream * 3000, 3000);
        assert_eq!(memory, [last; 3000]);
    }
}

#[test]
fn stream_numbers_are_ignored_without_streams() {
    let mut star = star((0, 0));
    for stream in 0..4 {
        star.write(0, stream);
    }
    star.rig.run();
    assert_eq!(star.rig.device(0).cost.count.connections, 1);
    let dci = star.dci;
    assert!(star.rig.reset_stream(&dci, 0).is_err());
    star.fail(3, false);
    star.rig.run();
    assert!(star.is_in_error());
}
