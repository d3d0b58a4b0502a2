// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Receive queues of QPs, and shared receive queues (SRQs, XRC SRQs and RMPs).
//!
//! The receive queue of a QP is a plain ring. A shared receive queue is a linked list of WQEs, since they are returned
//! in any order. The driver counts posted receives in a doorbell record, and rings no doorbell.

use crate::device::Device;
use crate::memory::{Dma, DmaFault};
use crate::object::buffer::Buffer;
use crate::object::eq::Event;
use crate::object::mkey::END_OF_LIST;
use crate::object::qp::Receive;
use crate::object::scatter::Segment;

/// Receive WQE.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiveWqe {
    /// Index of the WQE, for the completion.
    pub index: u16,
    /// Memory for the message.
    pub segments: Vec<Segment>,
}

/// Layout of a ring.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Offset of the ring in the buffer.
    pub start: u64,
    /// Log2 of the number of work requests.
    pub log_size: u32,
    /// Log2 of the size of a work request in bytes.
    pub log_stride: u32,
    /// `true` if work requests are linked.
    pub linked: bool,
    /// `true` if each work request begins with a signature.
    pub signed: bool,
    /// Address of the doorbell record.
    pub record: u64,
}

/// Ring of receive WQEs.
#[derive(Clone, Debug)]
pub struct Ring {
    buffer: Buffer,
    layout: Layout,
    /// Next WQE: its index, or for a plain ring the number of WQEs taken so far.
    next: u16,
    taken: u16,
}

impl Ring {
    /// Returns a ring from which no WQE is taken.
    pub fn new(buffer: Buffer, layout: Layout) -> Ring {
        Ring {
            buffer,
            layout,
            next: 0,
            taken: 0,
        }
    }

    /// Resets the ring; the doorbell record is then at 0.
    pub fn reset(&mut self) {
        self.next = 0;
        self.taken = 0;
    }

    /// Returns the number of posted work requests.
    pub fn waiting(&self, dma: &Dma) -> Result<u16, DmaFault> {
        Ok((dma.read_be32(self.layout.record)? as u16).wrapping_sub(self.taken))
    }

    /// Takes the next posted work request. Returns `None` if the ring is empty.
    pub fn take(&mut self, dma: &Dma) -> Result<Option<ReceiveWqe>, DmaFault> {
        if self.waiting(dma)? == 0 {
            return Ok(None);
        }
        let index = self.next;
        let slot = u64::from(index) & ((1 << self.layout.log_size) - 1);
        let mut bytes = vec![0; 1 << self.layout.log_stride];
        self.buffer.read(
            dma,
            self.layout.start + (slot << self.layout.log_stride),
            &mut bytes,
        )?;
        self.taken = self.taken.wrapping_add(1);
        self.next = if self.layout.linked {
            u16::from_be_bytes([bytes[2], bytes[3]])
        } else {
            index.wrapping_add(1)
        };
        let head = if self.layout.linked || self.layout.signed {
            Segment::SIZE
        } else {
            0
        };
        Ok(Some(ReceiveWqe {
            index,
            segments: segments(&bytes[head..]),
        }))
    }
}

fn segments(bytes: &[u8]) -> Vec<Segment> {
    let all = bytes.chunks_exact(Segment::SIZE).map(Segment::decode);
    all.take_while(|segment| segment.key != END_OF_LIST)
        .collect()
}

/// Kind of a shared receive queue, by its CREATE command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SrqKind {
    /// CREATE_SRQ.
    Basic,
    /// CREATE_RMP.
    Rmp,
    /// CREATE_XRC_SRQ.
    Xrc,
}

/// Shared receive queue.
#[derive(Clone, Debug)]
pub struct Srq {
    /// Kind.
    pub kind: SrqKind,
    /// Ring of work requests.
    pub ring: Ring,
    /// Protection domain.
    pub pd: u32,
    /// For XRC: XRC domain.
    pub xrcd: u32,
    /// For XRC: completion queue.
    pub cqn: u32,
    /// For XRC: user index in completions.
    pub user_index: u32,
    /// An event is due if fewer work requests than this are posted; 0 for no event.
    pub limit: u16,
    /// `true` if the queue has failed.
    pub failed: bool,
    /// Returned receives of aborted messages.
    pub returned: Vec<ReceiveWqe>,
    /// Context of the CREATE command: `wq`, or `xrc_srqc`.
    pub context: Vec<u8>,
}

/// Takes the next receive of a QP, from its receive queue or its SRQ. Returns `None` if no receive is posted.
pub fn take(device: &mut Device, receive: &mut Receive) -> Result<Option<ReceiveWqe>, DmaFault> {
    match receive {
        Receive::Own(ring) => ring.take(&device.dma),
        Receive::Shared(srqn) => take_shared(device, *srqn),
        Receive::None => Ok(None),
    }
}

/// Takes a receive from a shared queue, and raises an event if fewer receives than the limit are left. A fault in the
/// memory of the queue fails the queue.
pub fn take_shared(device: &mut Device, srqn: u32) -> Result<Option<ReceiveWqe>, DmaFault> {
    let Some(srq) = device.objects.srqs.get_mut(srqn).filter(|srq| !srq.failed) else {
        return Ok(None);
    };
    if let Some(wqe) = srq.returned.pop() {
        return Ok(Some(wqe));
    }
    let taken = srq.ring.take(&device.dma);
    if taken.is_err() {
        srq.failed = true;
        device.event(Event::SrqError(srqn));
        return taken;
    }
    check_limit(device, srqn)?;
    taken
}

/// Puts a receive back to its shared queue. The next message takes it first.
pub fn return_receive(device: &mut Device, srqn: u32, wqe: ReceiveWqe) {
    if let Some(srq) = device.objects.srqs.get_mut(srqn) {
        srq.returned.push(wqe);
    }
}

/// Raises one event if fewer work requests than the limit are posted.
pub fn check_limit(device: &mut Device, srqn: u32) -> Result<(), DmaFault> {
    let Some(srq) = device
        .objects
        .srqs
        .get_mut(srqn)
        .filter(|srq| srq.limit != 0)
    else {
        return Ok(());
    };
    if srq.ring.waiting(&device.dma)? < srq.limit {
        srq.limit = 0;
        device.event(Event::SrqLimit(srqn));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{memfd_create, MemfdFlags};

    use super::*;

    const RECORD: u64 = 0x8000;

    /// Returns memory with two pages for a ring, and one page for its doorbell record.
    fn memory() -> Dma {
        let file = File::from(memfd_create("ring", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(0x9000).unwrap();
        let mut dma = Dma::default();
        dma.map(0, 0x9000, file, 0, true).unwrap();
        dma
    }

    fn ring(linked: bool, record: u64) -> Ring {
        let buffer = Buffer::new(
            &[0x1000u64, 0x4000].map(u64::to_be_bytes).concat(),
            0,
            0,
            0x2000,
        )
        .unwrap();
        let layout = Layout {
            start: 0,
            log_size: 2,
            log_stride: 6,
            linked,
            signed: false,
            record,
        };
        Ring::new(buffer, layout)
    }

    fn write_segment(dma: &Dma, at: u64, key: u32, length: u32) {
        dma.write_be32(at, length).unwrap();
        dma.write_be32(at + 4, key).unwrap();
        dma.write(at + 8, &0xabcdu64.to_be_bytes()).unwrap();
    }

    fn indices(ring: &mut Ring, dma: &Dma) -> Vec<u16> {
        std::iter::from_fn(|| ring.take(dma).unwrap())
            .map(|wqe| wqe.index)
            .collect()
    }

    #[test]
    fn posted_receives_are_taken_once_in_order() {
        let (dma, mut ring) = (memory(), ring(false, RECORD));
        assert_eq!(ring.take(&dma), Ok(None));
        dma.write_be32(RECORD, 3).unwrap();
        assert_eq!(indices(&mut ring, &dma), [0, 1, 2]);
        dma.write_be32(RECORD, 5).unwrap();
        assert_eq!(ring.waiting(&dma), Ok(2));
        assert_eq!(indices(&mut ring, &dma), [3, 4]);
    }

    #[test]
    fn segments_end_at_list_end_or_wqe_end() {
        let (dma, mut ring) = (memory(), ring(false, RECORD));
        write_segment(&dma, 0x1000, 7, 10);
        write_segment(&dma, 0x1010, 8, 0);
        write_segment(&dma, 0x1020, END_OF_LIST, 0);
        dma.write_be32(RECORD, 2).unwrap();
        let address = 0xabcd;
        let segments = [
            Segment {
                key: 7,
                address,
                length: 10,
            },
            Segment {
                key: 8,
                address,
                length: 1 << 31,
            },
        ];
        assert_eq!(ring.take(&dma).unwrap().unwrap().segments, segments);
        assert_eq!(ring.take(&dma).unwrap().unwrap().segments.len(), 4);
    }

    #[test]
    fn linked_ring_follows_next_index() {
        let (dma, mut ring) = (memory(), ring(true, RECORD));
        for (index, next) in [(0u64, 2u16), (2, 3), (3, 0), (1, 7)] {
            dma.write(0x1002 + index * 64, &next.to_be_bytes()).unwrap();
        }
        dma.write_be32(RECORD, 4).unwrap();
        assert_eq!(indices(&mut ring, &dma), [0, 2, 3, 0]);
        ring.reset();
        assert_eq!(ring.take(&dma).unwrap().unwrap().index, 0);
    }

    #[test]
    fn unmapped_doorbell_record_is_fault() {
        let (dma, mut ring) = (memory(), ring(false, 0x10_0000));
        assert!(ring.take(&dma).is_err());
    }
}
