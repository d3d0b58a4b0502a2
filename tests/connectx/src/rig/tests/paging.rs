// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Absent pages: the device requests each page once, and no data is lost.

use std::time::Duration;

use super::dynamic::Star;
use super::*;
use crate::firmware::Status;
use crate::layout::ifc::*;
use crate::layout::put_be;
use crate::object::mkey::MTT;

const PAGE_FAULT: u8 = 0x0c;
const PAGE: u64 = 4096;

/// Longer than the delay after an RNR NAK.
const LATER: Duration = Duration::from_secs(10);

impl Rig {
    /// Enables page faults of a machine.
    fn begin_paging(&mut self, node: usize) {
        self.device(node).firmware.settings.page_faults = true;
        self.events(node);
    }

    /// Replaces the table entry of the second page. Returns the previous entry.
    fn swap(&mut self, mr: &Mr, new: [u8; MTT]) -> [u8; MTT] {
        let keys = &mut self.device(mr.node).objects.mkeys;
        let mkey = keys.get_mut(mr.key >> 8).unwrap();
        let old = mkey.table()[MTT..2 * MTT].try_into().unwrap();
        mkey.set_table(MTT, &new).unwrap();
        old
    }

    /// Replies to the page request in the only pending event.
    fn resume(&mut self, mr: &Mr, page: Option<[u8; MTT]>) {
        let events = self.events(mr.node);
        let [(PAGE_FAULT, token)] = events[..] else {
            panic!("not one page fault, but {events:x?}");
        };
        page.map(|page| self.swap(mr, page));
        let mut input = [0; 16];
        put_be(&mut input, 0, 2, u64::from(MLX5_CMD_OP_PAGE_FAULT_RESUME));
        put_be(&mut input, 8, 4, u64::from(page.is_none()) << 31);
        put_be(&mut input, 12, 4, u64::from(token));
        self.command(mr.node, &input, 16).unwrap();
    }
}

impl Pair {
    /// Returns two connected machines with page faults enabled.
    fn paging() -> Self {
        let mut pair = Pair::reliable();
        pair.rig.begin_paging(0);
        pair.rig.begin_paging(1);
        pair
    }

    /// Makes the second page of the memory of a machine absent. Returns its table entry.
    fn take(&mut self, node: usize) -> [u8; MTT] {
        self.swap(node, [0; MTT])
    }

    fn swap(&mut self, node: usize, new: [u8; MTT]) -> [u8; MTT] {
        self.rig.swap(&self.mrs[node], new)
    }

    fn resume(&mut self, node: usize, page: Option<[u8; MTT]>) {
        self.rig.resume(&self.mrs[node], page);
        self.rig.advance_time(LATER);
    }

    /// Executes a work request of the first queue pair that accesses an absent page of `node`. The driver makes the
    /// page present.
    fn perform_paging(&mut self, node: usize, work: &WorkRequest) -> Cqe {
        let page = self.take(node);
        self.rig.post(&mut self.qps[0], work);
        self.rig.run();
        assert_eq!(self.rig.poll(&mut self.cqs[0]), None);
        self.rig.advance_time(LATER);
        assert_eq!(self.rig.poll(&mut self.cqs[0]), None);
        self.resume(node, Some(page));
        self.rig.expect(&mut self.cqs[0])
    }

    /// Executes a work request as [`Pair::perform_paging`] does. The driver rejects the page request.
    fn perform_without_page(&mut self, node: usize, work: &WorkRequest) -> Cqe {
        self.take(node);
        self.rig.post(&mut self.qps[0], work);
        self.rig.run();
        self.resume(node, None);
        self.rig.expect(&mut self.cqs[0])
    }
}

const ACROSS: u64 = PAGE - 100;
const BYTES: u32 = 5000;

#[test]
fn write_and_read_wait_for_absent_pages_at_both_ends() {
    for node in [0, 1] {
        let mut pair = Pair::paging();
        let data = pair.fill(0, ACROSS, BYTES.into());
        let work = WorkRequest::write(&pair.mrs[1], ACROSS).local(&pair.mrs[0], ACROSS, BYTES);
        assert_eq!(pair.perform_paging(node, &work).kind, MLX5_CQE_REQ);
        assert_eq!(pair.memory(1, ACROSS, BYTES as usize), data);

        let mut pair = Pair::paging();
        let data = pair.fill(1, ACROSS, BYTES.into());
        let work = WorkRequest::read(&pair.mrs[1], ACROSS).local(&pair.mrs[0], ACROSS, BYTES);
        assert_eq!(pair.perform_paging(node, &work).kind, MLX5_CQE_REQ);
        assert_eq!(pair.memory(0, ACROSS, BYTES as usize), data);
    }
}

#[test]
fn send_with_absent_receive_page_takes_one_receive() {
    let mut pair = Pair::paging();
    let data = pair.fill(0, 0, BYTES.into());
    let receives = [pair.receive(), pair.receive()];
    let work = pair.local(WorkRequest::send(), BYTES);
    assert_eq!(pair.perform_paging(1, &work).kind, MLX5_CQE_REQ);
    assert_eq!(pair.memory(1, 0, BYTES as usize), data);
    let cqe = pair.rig.expect(&mut pair.cqs[1]);
    assert_eq!((cqe.counter, cqe.bytes), (receives[0], BYTES));
    assert_eq!(pair.rig.poll(&mut pair.cqs[1]), None);
}

#[test]
fn atomic_on_absent_page_is_executed_once() {
    let mut pair = Pair::paging();
    let work = WorkRequest::fetch_add(&pair.mrs[1], PAGE, 5).local(&pair.mrs[0], 0, 8);
    assert_eq!(pair.perform_paging(1, &work).kind, MLX5_CQE_REQ);
    assert_eq!(pair.memory(1, PAGE, 8), 5u64.to_le_bytes());
}

#[test]
fn datagram_waits_for_absent_source_page() {
    let mut pair = Pair::new(Transport::Ud, &Options::default());
    pair.rig.begin_paging(0);
    let data = pair.fill(0, PAGE, 100);
    pair.receive();
    let (lid, number) = (pair.rig.lid(1), pair.qps[1].number);
    let key = u64::from(Options::default().qkey) << 32;
    let work = WorkRequest::send().address(key, number, lid, None);
    let work = work.local(&pair.mrs[0], PAGE, 100);
    assert_eq!(pair.perform_paging(0, &work).kind, MLX5_CQE_REQ);
    assert_eq!(pair.memory(1, 40, 100), data);
}

#[test]
fn unresolved_page_fails_request() {
    let work =
        |pair: &Pair| WorkRequest::write(&pair.mrs[1], ACROSS).local(&pair.mrs[0], ACROSS, BYTES);
    let mut pair = Pair::paging();
    let cqe = pair.perform_without_page(0, &work(&pair));
    assert!(cqe.failed_by(Syndrome::LocalProtection));
    let mut pair = Pair::paging();
    let cqe = pair.perform_without_page(1, &work(&pair));
    assert!(cqe.failed_by(Syndrome::RemoteAccess));
}

#[test]
fn page_fault_rejected_before_reset_is_raised_again() {
    let mut pair = Pair::paging();
    let work = WorkRequest::write(&pair.mrs[1], ACROSS).local(&pair.mrs[0], ACROSS, BYTES);
    let page = pair.take(1);
    pair.rig.post(&mut pair.qps[0], &work);
    pair.rig.run();
    // The sender does not retry.
    pair.rig.reset(&mut pair.qps[0]);
    pair.resume(1, None);
    pair.swap(1, page);
    pair.rig.reset(&mut pair.qps[1]);
    let [one, other] = pair.qps;
    pair.rig.connect(&one, &other, &Options::default());
    pair.rig.events(1);
    assert_eq!(pair.perform_paging(1, &work).kind, MLX5_CQE_REQ);
}

/// DC targets and queue pairs share a range of numbers.
#[test]
fn page_fault_of_dct_survives_destruction_of_unknown_qp() {
    let mut star = Star::with(&Options::default(), (0, 0));
    star.rig.begin_paging(1);
    let target = &star.targets[0];
    let (number, peer) = (target.dct.number, target.mr);
    star.rig.swap(&peer, [0; MTT]);
    star.write(0, (PAGE / 8) as u16);
    star.rig.run();
    star.rig.resume(&peer, None);
    let destroyed = star.rig.try_simple(1, MLX5_CMD_OP_DESTROY_QP, number);
    assert_eq!(destroyed, Err(Status::BadResource as u8));
    star.rig.advance_time(LATER);
    let cqe = star.rig.expect(&mut star.cq);
    assert!(cqe.failed_by(Syndrome::RemoteAccess));
}

#[test]
fn driver_without_paging_receives_no_page_fault() {
    let mut pair = Pair::reliable();
    pair.rig.events(1);
    pair.take(1);
    let work = WorkRequest::write(&pair.mrs[1], ACROSS).local(&pair.mrs[0], ACROSS, BYTES);
    let cqe = pair.perform(&work);
    assert!(cqe.failed_by(Syndrome::RemoteAccess));
    assert!(pair
        .rig
        .events(1)
        .iter()
        .all(|(kind, _)| *kind != PAGE_FAULT));
}
