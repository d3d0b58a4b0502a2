// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Fuzzing with a hostile driver. The input selects actions of a valid driver, and bytes of them to change. Most input
//! is therefore nearly valid and reaches deep into the device.
//!
//! The only expectation is that the fabric neither panics nor hangs. The targets in `fuzz/` call this module, and a
//! test calls it with reproducible input.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::Duration;

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::{Mr, Options, Rig, RigCq, RigQp, RigSrq, Spec, WorkRequest};
use crate::bar;
use crate::device::DeviceId;
use crate::firmware;
use crate::layout::ifc::MLX5_CMD_OP_ALLOC_XRCD;
use crate::layout::wqe::*;
use crate::layout::{be32, put_be};
use crate::object::qp::Transport;
use crate::vfio::codec::message;
use crate::vfio::connection::VfioConnection;

/// Bytes of memory that has a key.
const LENGTH: u64 = 1 << 16;
const DC_KEY: u64 = 0xfeed;

const TRANSPORTS: [Transport; 8] = [
    Transport::Rc,
    Transport::Uc,
    Transport::Ud,
    Transport::Xrc,
    Transport::Dci,
    Transport::Umr,
    Transport::Smi,
    Transport::Gsi,
];

/// Opcodes of all supported commands.
static OPCODES: LazyLock<Vec<u16>> = LazyLock::new(|| {
    let all = 0..0x1000;
    all.filter(|opcode| firmware::handler(*opcode).is_some())
        .collect()
});

/// Input of a fuzzer. After its end, all bytes are 0.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn has_bytes(&self) -> bool {
        !self.0.is_empty()
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (here, rest) = self.0.split_at(N.min(self.0.len()));
        taken[..here.len()].copy_from_slice(here);
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> usize {
        usize::from(self.take::<1>()[0])
    }

    fn word(&mut self) -> usize {
        usize::from(u16::from_be_bytes(self.take()))
    }

    /// Changes up to seven bytes at any positions.
    fn change(&mut self, bytes: &mut [u8]) {
        for _ in 0..self.byte() % 8 {
            let (at, value) = (self.word() % bytes.len(), self.take::<1>());
            bytes[at..=at].copy_from_slice(&value);
        }
    }
}

/// Driver with one object of each kind. Its queue pairs are connected to themselves.
struct FuzzMachine {
    rig: Rig,
    cq: RigCq,
    mr: Mr,
    qps: [RigQp; TRANSPORTS.len()],
    srqs: [RigSrq; 2],
    dct: u32,
}

impl FuzzMachine {
    fn new(mut rig: Rig) -> Self {
        let (cq, mr) = (rig.cq(0, 6), rig.mr(0, LENGTH));
        let xrcd = rig.simple(0, MLX5_CMD_OP_ALLOC_XRCD, 0);
        let srqs = [None, Some((xrcd, cq))].map(|xrc| rig.srq(0, 4, xrc));
        let dct = rig.dct(&srqs[0], &cq, DC_KEY, &Options::default()).number;
        let qps = TRANSPORTS.map(|transport| {
            let spec = Spec {
                xrcd,
                srq: (transport == Transport::Xrc).then_some(srqs[1]),
                log_streams: (2, 1),
                ..Spec::new(transport, cq)
            };
            let qp = rig.qp(0, &spec);
            rig.connect_to(&qp, qp.number, 0, &Options::default());
            qp
        });
        FuzzMachine {
            rig,
            cq,
            mr,
            qps,
            srqs,
            dct,
        }
    }

    /// Returns the numbers of existing objects.
    fn numbers(&self) -> Vec<u32> {
        let mut numbers = vec![self.cq.number, self.mr.key >> 8, self.dct];
        numbers.extend(self.qps.map(|qp| qp.number));
        numbers.extend(self.srqs.map(|srq| srq.number));
        numbers
    }

    /// Executes a changed command: a command of the set-up, or any other command for an existing object.
    fn command(&mut self, choices: &mut Choices<'_>) {
        let choice = choices.byte();
        let mut input = match self.rig.history.get(choice / 4) {
            Some(command) => command.clone(),
            None => {
                let numbers = self.numbers();
                let mut input = vec![0; 512];
                let opcode = OPCODES[choices.byte() % OPCODES.len()];
                put_be(&mut input, 0, 2, u64::from(opcode));
                let number = numbers[choices.byte() % numbers.len()];
                put_be(&mut input, 8, 4, u64::from(number));
                input
            }
        };
        choices.change(&mut input);
        let output = choices.word() % 2048 + 16;
        self.rig.submit(0, &input, output);
    }

    /// Posts receives and a work request, optionally changed.
    fn work(&mut self, choices: &mut Choices<'_>) {
        let mr = self.mr;
        let which = choices.byte() % self.qps.len();
        let mut qp = self.qps[which];
        if choices.byte() % 2 == 0 {
            let pieces = [(mr, choices.word() as u64, choices.word() as u32)];
            self.rig.receive(&mut qp, &pieces);
            for srq in &mut self.srqs {
                self.rig.receive_shared(srq, &pieces);
            }
        }
        let kind = choices.byte();
        let work = self.add_address(TRANSPORTS[which], request(kind, &mr, choices.word() as u32));
        let mut bytes = work.encode(qp.number, qp.produced);
        choices.change(&mut bytes);
        let index = self.rig.post_raw(&mut qp, &bytes);
        self.rig.ring(&qp, index);
        self.qps[which] = qp;
        if choices.byte() % 2 == 0 {
            self.rig.run();
        }
    }

    /// Adds the address or SRQ that the transport requires to a work request.
    fn add_address(&mut self, transport: Transport, work: WorkRequest) -> WorkRequest {
        let lid = self.rig.lid(0);
        match transport {
            Transport::Ud => self.datagram(self.qps[2].number, lid, work),
            Transport::Smi => self.datagram(0, lid, work),
            Transport::Gsi => self.datagram(1, lid, work),
            Transport::Dci => work.address(DC_KEY, self.dct, lid, None),
            Transport::Xrc => work.for_srq(self.srqs[1].number),
            _ => work,
        }
    }

    /// Returns a work request with a datagram address of a queue pair of this driver.
    fn datagram(&self, number: u32, lid: u16, work: WorkRequest) -> WorkRequest {
        let qkey = u64::from(Options::default().qkey) << 32;
        work.address(qkey, number, lid, Some([0xfe; 16]))
    }

    /// Rings a valid doorbell with changed contents.
    fn ring(&mut self, choices: &mut Choices<'_>) {
        let qp = &self.qps[choices.byte() % self.qps.len()];
        let first = u32::from(qp.produced) << 8;
        let (register, words) = match choices.byte() % 5 {
            0 => (0x20, [0, self.cq.number]),
            1 => (0x40, [0, 0]),
            2 => (0x48, [0, 0]),
            3 => (0x800, [first, qp.number << 8]),
            _ => (0x900, [first, qp.number << 8]),
        };
        let mut bytes = words.map(u32::to_be_bytes).concat();
        choices.change(&mut bytes);
        self.rig.write_uar(0, register, &bytes);
    }

    /// Writes or reads any part of BAR 0.
    fn access(&mut self, choices: &mut Choices<'_>) {
        let offset = u64::from(be32(&choices.take::<4>(), 0)) % bar::SIZE;
        let mut bytes = choices.take::<8>().repeat(8);
        bytes.truncate([1, 2, 3, 4, 8, 64][choices.byte() % 6]);
        self.rig.write_bar(0, offset, &bytes);
        let now = self.rig.now;
        bar::read(self.rig.device(0), offset, &mut bytes, now);
    }

    /// Changes memory that the device reads: rings, doorbell records, command queue.
    fn overwrite_memory(&mut self, choices: &mut Choices<'_>) {
        let address = choices.word() as u64 * 8 % self.rig.allocated(0);
        let bytes = choices.take::<8>();
        // The first page is not mapped.
        let _ = self.rig.device(0).dma.write(address, &bytes);
    }
}

/// Returns a work request of a kind, with `length` bytes of data.
fn request(kind: usize, mr: &Mr, length: u32) -> WorkRequest {
    const IMMEDIATE: u32 = 7;
    let masked = |opcode| WorkRequest::new(opcode).remote(mr, 0).words(&[1, 2, 3, 4]);
    let window = || {
        // Control of UMR and context, which the fuzzer fills in, and an inline table.
        let umr = WorkRequest::new(MLX5_OPCODE_UMR).words(&[0x80 << 56, 0, 0, 0, 0, 0]);
        umr.words(&[0; 16]).with_immediate(MLX5_OPCODE_UMR, mr.key)
    };
    match kind % 13 {
        0 => WorkRequest::send().local(mr, 0, length),
        1 => WorkRequest::send().inline(&[1; 40]),
        2 => WorkRequest::send()
            .local(mr, 0, length)
            .local(mr, 8, length),
        3 => WorkRequest::write(mr, 0).local(mr, 0, length),
        4 => WorkRequest::read(mr, 0).local(mr, 0, length),
        5 => WorkRequest::fetch_add(mr, 0, 1).local(mr, 0, 8),
        6 => WorkRequest::compare_swap(mr, 0, 1, 2).local(mr, 0, 8),
        7 => masked(MLX5_OPCODE_ATOMIC_MASKED_CS).local(mr, 0, 8),
        8 => window(),
        9 => WorkRequest::send()
            .local(mr, 0, length)
            .with_immediate(MLX5_OPCODE_SEND_IMM, IMMEDIATE),
        10 => WorkRequest::write(mr, 0)
            .local(mr, 0, length)
            .with_immediate(MLX5_OPCODE_RDMA_WRITE_IMM, IMMEDIATE),
        11 => WorkRequest::send().with_immediate(MLX5_OPCODE_SEND_INVAL, mr.key),
        _ => WorkRequest::new(MLX5_OPCODE_NOP),
    }
}

/// Executes steps until the end of the input, and advances the time. The first byte selects mapped doorbells.
fn run_steps(data: &[u8], mut step: impl FnMut(&mut FuzzMachine, &mut Choices<'_>)) {
    let mut choices = Choices(data);
    let mut machine = FuzzMachine::new(match choices.byte() % 2 {
        0 => Rig::new(1),
        _ => Rig::mapped(1),
    });
    while choices.has_bytes() {
        step(&mut machine, &mut choices);
    }
    machine.rig.advance_time(Duration::from_secs(1));
}

/// Firmware commands, with traffic between them.
pub fn commands(data: &[u8]) {
    run_steps(data, |machine, choices| match choices.byte() % 4 {
        0 => machine.work(choices),
        _ => machine.command(choices),
    });
}

/// Work requests.
pub fn work(data: &[u8]) {
    run_steps(data, FuzzMachine::work);
}

/// Doorbells and other accesses to BAR 0, and changes of the memory that they make the device read.
pub fn doorbells(data: &[u8]) {
    run_steps(data, |machine, choices| {
        match choices.byte() % 4 {
            0 => machine.work(choices),
            1 => machine.ring(choices),
            2 => machine.access(choices),
            _ => machine.overwrite_memory(choices),
        }
        machine.rig.run();
    });
}

/// Messages of vfio-user.
pub fn messages(data: &[u8]) {
    let mut choices = Choices(data);
    let mut rig = Rig::new(1);
    let (socket, served) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut connection = VfioConnection::new(DeviceId(0), served).unwrap();
    let version = message(1, &[0; 4]);
    send(&socket, &version, false);
    while connection.serve(&mut rig.fabric).is_ok() && choices.has_bytes() {
        rig.run();
        while (&socket).read(&mut [0; 1 << 16]).is_ok_and(|read| read > 0) {}
        let mut sent = message(choices.byte() as u16 % 15, &body(&mut choices));
        choices.change(&mut sent);
        send(&socket, &sent, choices.byte() % 2 == 0);
    }
}

/// Returns the body of a message: words, most of them small.
fn body(choices: &mut Choices<'_>) -> Vec<u8> {
    let words = choices.byte() % 10;
    let words = (0..words).map(|_| {
        let word = choices.take::<4>();
        match choices.byte() % 4 {
            0 => u32::from_ne_bytes(word),
            _ => u32::from(word[0]),
        }
    });
    words.flat_map(u32::to_ne_bytes).collect()
}

/// Sends a message, with or without a file. Drops a message for which the socket has no room.
fn send(mut socket: &UnixStream, message: &[u8], with_file: bool) {
    if !with_file {
        let _ = socket.write_all(message);
        return;
    }
    let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LENGTH).unwrap();
    let fds = [file.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let parts = [std::io::IoSlice::new(message)];
    let _ = sendmsg(socket, &parts, &mut ancillary, SendFlags::empty());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn arbitrary_machine_actions_do_not_panic() {
        let mut random = Random::new(1);
        for target in [commands as fn(&[u8]), work, doorbells, messages] {
            for _ in 0..25 {
                let words = (0..32).map(|_| random.next().to_le_bytes());
                target(&words.flatten().collect::<Vec<_>>());
            }
        }
    }
}
