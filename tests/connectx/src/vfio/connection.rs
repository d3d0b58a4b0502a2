// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The connection of one machine to its device: takes its messages and answers them.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tracing::{debug, trace};

use super::codec::{Body, Header, Request, HEADER, MAX_BODY, MAX_FDS, MAX_TRANSFER};
use crate::bar;
use crate::device::{Device, DeviceId};
use crate::fabric::Fabric;
use crate::interrupts::VECTORS;
use crate::pci;

/// The regions of a PCI device, in vfio's order: six BARs, ROM, configuration space, VGA.
const REGIONS: u32 = 9;
const BAR0: u32 = 0;
const CONFIG: u32 = 7;

/// The kinds of interrupts of a PCI device, in vfio's order: INTx, MSI, MSI-X, error, request.
const IRQS: u32 = 5;
const MSIX: u32 = 2;

const READABLE: u32 = 1;
const WRITABLE: u32 = 2;
const MAPPABLE: u32 = 4;
const HAS_CAPABILITIES: u32 = 8;

/// Bytes of the description of a region, before its capabilities.
const REGION_INFO: u32 = 32;

/// The capability of a region parts of which can be mapped, and its version.
const SPARSE_MMAP: u32 = 1 | (1 << 16);

const DEVICE_RESETS: u32 = 1;
const DEVICE_IS_PCI: u32 = 2;

const IRQ_EVENTFD: u32 = 1;
const IRQ_NORESIZE: u32 = 8;
const SET_NONE: u32 = 1;
const SET_EVENTFD: u32 = 4;
const SET_TRIGGER: u32 = 32;

const VERSION: &[u8] = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":65536}}\0";

/// A machine's connection.
#[derive(Debug)]
pub struct Connection {
    id: DeviceId,
    socket: UnixStream,
    /// Room for the longest message.
    buffer: Vec<u8>,
    /// Bytes of it that have come and were not answered yet.
    filled: usize,
    /// Files that came, in order, each with the place in the buffer where the bytes end that it came with.
    files: Vec<(usize, OwnedFd)>,
    agreed: bool,
}

impl Connection {
    /// Takes the socket of a machine that has just connected.
    pub fn new(id: DeviceId, socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Connection {
            id,
            socket,
            buffer: vec![0; HEADER + MAX_BODY],
            filled: 0,
            files: Vec::new(),
            agreed: false,
        })
    }

    /// Its socket, to wait for.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Answers what has come, or the first of it. An error ends the connection.
    pub fn serve(&mut self, fabric: &mut Fabric) -> io::Result<()> {
        self.fill()?;
        let buffer = std::mem::take(&mut self.buffer);
        let mut done = 0;
        while let Some((header, body)) = first(&buffer[done..self.filled])? {
            done += header.size as usize;
            let files = self.files.partition_point(|(end, _)| *end <= done);
            let files = self.files.drain(..files).map(|(_, file)| file).collect();
            self.take(fabric, header, body, files)?;
        }
        self.buffer = buffer;
        self.buffer.copy_within(done..self.filled, 0);
        self.filled -= done;
        self.files.iter_mut().for_each(|(end, _)| *end -= done);
        Ok(())
    }

    fn take(
        &mut self,
        fabric: &mut Fabric,
        header: Header,
        body: &[u8],
        files: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let request = Request::decode(header.command, body);
        let outcome = request.and_then(|request| self.answer(fabric, request, files));
        if let Err(errno) = outcome {
            debug!(device = self.id.0, command = header.command, %errno, "refused");
        }
        let attached = match (&request, &outcome) {
            (Ok(Request::RegionInfo { index: BAR0, .. }), Ok(_)) => {
                fabric.device(self.id).doorbells.as_ref()
            }
            _ => None,
        };
        match header.reply(outcome) {
            Some(reply) => self.send(&reply, attached),
            None => Ok(()),
        }
    }

    /// Takes what has come, all of it if there is room: a call for each message would be most of what a
    /// doorbell costs. The kernel stops after the bytes that files came with, and no message with files is
    /// sent together with others, so they are for the message of the last byte.
    fn fill(&mut self) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut self.buffer[self.filled..])];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        self.filled += received;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files.map(|file| (self.filled, file)));
            }
        }
        if received == 0 || self.files.len() > MAX_FDS {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    /// A machine that has so many answers to read that another does not fit will not be waited for.
    fn send(&self, reply: &[u8], attached: Option<&File>) -> io::Result<()> {
        let fds = attached.map(|file| [file.as_fd()]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if let Some(fds) = &fds {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&self.socket, &[IoSlice::new(reply)], &mut ancillary, flags) {
            Ok(sent) if sent == reply.len() => Ok(()),
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn answer(
        &mut self,
        fabric: &mut Fabric,
        request: Request<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Errno> {
        if let Request::Version { major, .. } = request {
            self.agreed = major == 0;
            let version = Body::default().u32(0).bytes(VERSION).finish();
            return self.agreed.then_some(version).ok_or(Errno::NOTSUP);
        }
        if !self.agreed {
            return Err(Errno::PROTO);
        }
        let device = fabric.device(self.id);
        match request {
            Request::Version { .. } => Err(Errno::INVAL),
            Request::DmaMap { .. } => map(device, request, fds),
            Request::DmaUnmap {
                address,
                size,
                echo,
            } => {
                device.dma.unmap(address, size);
                Ok(echo.into())
            }
            Request::DeviceInfo => Ok(device_info()),
            Request::RegionInfo { room, index } => {
                let mappable = index == BAR0 && device.doorbells.is_some();
                region_info(room, index, mappable)
            }
            Request::IrqInfo { index } => irq_info(index),
            Request::SetIrqs { .. } => set_irqs(device, request, fds),
            Request::RegionRead {
                offset,
                region,
                count,
            } => read(fabric, self.id, region, offset, count),
            Request::RegionWrite {
                offset,
                region,
                data,
            } => write(fabric, self.id, region, offset, data),
            Request::Reset => {
                device.reset();
                device.pci = pci::Config::default();
                Ok(Vec::new())
            }
        }
    }
}

/// The first message, header and body, if all of it is there.
fn first(bytes: &[u8]) -> io::Result<Option<(Header, &[u8])>> {
    let Some(header) = bytes.first_chunk() else {
        return Ok(None);
    };
    let header = Header::decode(header).ok_or(io::ErrorKind::InvalidData)?;
    let body = bytes.get(HEADER..header.size as usize);
    Ok(body.map(|body| (header, body)))
}

/// Memory without a file is that of another device, which the network has no use for.
fn map(device: &mut Device, request: Request<'_>, fds: Vec<OwnedFd>) -> Result<Vec<u8>, Errno> {
    let Request::DmaMap {
        flags,
        offset,
        address,
        size,
    } = request
    else {
        return Err(Errno::INVAL);
    };
    debug!(
        device = device.id.0,
        "map {size:#x} bytes at {address:#x}, {} files",
        fds.len()
    );
    if let Some(fd) = fds.into_iter().next().filter(|_| flags & READABLE != 0) {
        let writable = flags & WRITABLE != 0;
        let mapped = device
            .dma
            .map(address, size, File::from(fd), offset, writable);
        mapped.map_err(|_| Errno::INVAL)?;
    }
    Ok(Vec::new())
}

fn device_info() -> Vec<u8> {
    let body = Body::default().u32(16).u32(DEVICE_RESETS | DEVICE_IS_PCI);
    body.u32(REGIONS).u32(IRQS).finish()
}

/// Returns the description of a region. The first word is its full length: a client with less room repeats the
/// request.
fn region_info(room: u32, index: u32, mappable: bool) -> Result<Vec<u8>, Errno> {
    let size = region_size(index)?;
    let mut flags = if size > 0 { READABLE | WRITABLE } else { 0 };
    let (mut capabilities, mut offset) = (Vec::new(), 0);
    if mappable {
        flags |= MAPPABLE | HAS_CAPABILITIES;
        capabilities = mappable_part();
        offset = REGION_INFO;
    }
    let whole = REGION_INFO + capabilities.len() as u32;
    let body = Body::default().u32(whole).u32(flags).u32(index).u32(offset);
    let mut info = body.u64(size).u64(0).bytes(&capabilities).finish();
    info.truncate(room as usize);
    Ok(info)
}

/// UAR pages, as the only capability and its only area.
fn mappable_part() -> Vec<u8> {
    let Range { start, end } = bar::UAR_PAGES;
    let header = Body::default().u32(SPARSE_MMAP).u32(0);
    let areas = header.u32(1).u32(0).u64(start).u64(end - start);
    areas.finish()
}

fn region_size(index: u32) -> Result<u64, Errno> {
    match index {
        BAR0 => Ok(bar::SIZE),
        CONFIG => Ok(pci::SIZE as u64),
        0..REGIONS => Ok(0),
        _ => Err(Errno::INVAL),
    }
}

fn irq_info(index: u32) -> Result<Vec<u8>, Errno> {
    let (flags, count) = match index {
        MSIX => (IRQ_EVENTFD | IRQ_NORESIZE, VECTORS as u32),
        0..IRQS => (0, 0),
        _ => return Err(Errno::INVAL),
    };
    Ok(Body::default()
        .u32(16)
        .u32(flags)
        .u32(index)
        .u32(count)
        .finish())
}

fn set_irqs(
    device: &mut Device,
    request: Request<'_>,
    fds: Vec<OwnedFd>,
) -> Result<Vec<u8>, Errno> {
    let Request::SetIrqs {
        flags,
        index,
        start,
        count,
    } = request
    else {
        return Err(Errno::INVAL);
    };
    let end = start.checked_add(count).ok_or(Errno::INVAL)?;
    if index != MSIX || end > VECTORS as u32 || flags & SET_TRIGGER == 0 {
        // The kinds that the device has none of may be disabled.
        return if index < IRQS && count == 0 {
            Ok(Vec::new())
        } else {
            Err(Errno::INVAL)
        };
    }
    trace!(
        device = device.id.0,
        flags,
        start,
        count,
        "interrupts of the machine"
    );
    let mut fds = fds.into_iter();
    match flags & (SET_NONE | SET_EVENTFD) {
        SET_NONE if count == 0 => device.interrupts.disconnect(),
        SET_NONE => (start..end).for_each(|vector| device.interrupts.raise(vector as usize)),
        SET_EVENTFD => {
            for vector in start..end {
                device.interrupts.connect(vector as usize, fds.next());
            }
        }
        _ => return Err(Errno::INVAL),
    }
    Ok(Vec::new())
}

fn within(region: u32, offset: u64, count: usize) -> Result<(), Errno> {
    let end = offset.checked_add(count as u64).ok_or(Errno::INVAL)?;
    (count > 0 && end <= region_size(region)?)
        .then_some(())
        .ok_or(Errno::INVAL)
}

fn read(
    fabric: &mut Fabric,
    id: DeviceId,
    region: u32,
    offset: u64,
    count: u32,
) -> Result<Vec<u8>, Errno> {
    within(region, offset, count as usize)?;
    debug_assert!(count as usize <= MAX_TRANSFER);
    let mut data = vec![0; count as usize];
    let (device, outbox) = fabric.parts(id);
    match region {
        CONFIG => device.pci.read(offset as usize, &mut data),
        _ => bar::read(device, offset, &mut data, outbox.now),
    }
    let body = Body::default().u64(offset).u32(region).u32(count);
    Ok(body.bytes(&data).finish())
}

fn write(
    fabric: &mut Fabric,
    id: DeviceId,
    region: u32,
    offset: u64,
    data: &[u8],
) -> Result<Vec<u8>, Errno> {
    within(region, offset, data.len())?;
    let (device, outbox) = fabric.parts(id);
    match region {
        CONFIG => {
            if device.pci.write(offset as usize, data) {
                device.reset();
            }
        }
        _ => bar::write(device, offset, data, outbox),
    }
    Ok(Body::default()
        .u64(offset)
        .u32(region)
        .u32(data.len() as u32)
        .finish())
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};

    use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

    use super::*;
    use crate::vfio::codec::message;

    const ID: DeviceId = DeviceId(0);

    /// A machine that has connected, and the device's side.
    struct Machine {
        socket: UnixStream,
        connection: Connection,
        fabric: Fabric,
    }

    impl Machine {
        fn new() -> Self {
            let (socket, served) = UnixStream::pair().unwrap();
            socket.set_nonblocking(true).unwrap();
            Machine {
                socket,
                connection: Connection::new(ID, served).unwrap(),
                fabric: Fabric::new(1),
            }
        }

        fn agreed() -> Self {
            let mut machine = Machine::new();
            machine.ask(1, &[0; 4]).unwrap();
            machine
        }

        fn serve(&mut self) -> io::Result<()> {
            self.connection.serve(&mut self.fabric)
        }

        /// Sends a request and returns the body of the reply.
        fn ask(&mut self, command: u16, body: &[u8]) -> Result<Vec<u8>, Errno> {
            self.ask_with(command, body, &[])
        }

        fn ask_with(
            &mut self,
            command: u16,
            body: &[u8],
            fds: &[BorrowedFd<'_>],
        ) -> Result<Vec<u8>, Errno> {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
            }
            let message = message(command, body);
            let parts = [IoSlice::new(&message)];
            sendmsg(&self.socket, &parts, &mut ancillary, SendFlags::empty()).unwrap();
            self.serve().unwrap();
            self.reply()
        }

        /// A message of the device, with what came along.
        fn receive(&mut self) -> (Vec<u8>, Vec<OwnedFd>) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut bytes = vec![0; 4096];
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received = recvmsg(&self.socket, &mut parts, &mut ancillary, flags).unwrap();
            bytes.truncate(received.bytes);
            let fds = ancillary.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            (bytes, fds.flatten().collect())
        }

        fn reply(&mut self) -> Result<Vec<u8>, Errno> {
            let mut reply = vec![0; 1 << 17];
            let length = self.socket.read(&mut reply).unwrap();
            assert_eq!(reply[4..8], (length as u32).to_ne_bytes());
            match reply[8] {
                1 => Ok(reply[HEADER..length].to_vec()),
                _ => Err(Errno::from_raw_os_error(i32::from(reply[12]))),
            }
        }

        fn map(&mut self, address: u64, size: u64) -> Result<Vec<u8>, Errno> {
            let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, size).unwrap();
            let body = Body::default().u32(32).u32(READABLE | WRITABLE);
            let body = body.u64(0).u64(address).u64(size).finish();
            self.ask_with(2, &body, &[file.as_fd()])
        }
    }

    fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
        Body::default().u64(offset).u32(region).u32(count).finish()
    }

    #[test]
    fn a_machine_reads_what_its_device_is() {
        let mut machine = Machine::agreed();
        let reply = machine.ask(9, &access(CONFIG, 0, 4)).unwrap();
        assert_eq!(reply[16..], [0xb3, 0x15, 0x19, 0x10]);
        let info = machine
            .ask(5, &Body::default().u32(32).u32(0).u32(BAR0).finish())
            .unwrap();
        assert_eq!(info[16..24], bar::SIZE.to_ne_bytes());
    }

    #[test]
    fn a_machine_may_map_doorbells_and_nothing_else() {
        const FD: usize = HEADER + 64;
        let mut machine = Machine::agreed();
        machine.fabric.map_doorbells().unwrap();
        let ask = |room: u32| message(5, &Body::default().u32(room).u32(0).u32(BAR0).finish());
        machine.socket.write_all(&ask(64)).unwrap();
        machine.serve().unwrap();
        let (reply, fds) = machine.receive();
        assert_eq!((reply.len(), fds.len()), (FD, 1));
        let word = |at: usize| u64::from_ne_bytes(reply[at..at + 8].try_into().unwrap());
        let (start, size) = (word(FD - 16), word(FD - 8));
        assert_eq!(start, u64::from(bar::FIRST_UAR) << 12);
        assert_eq!(size, u64::from(bar::UARS) << 12);
        assert_eq!(
            File::from(fds.into_iter().next().unwrap())
                .metadata()
                .unwrap()
                .len(),
            bar::SIZE
        );
        // A client with too little room receives the length that it needs.
        machine.socket.write_all(&ask(32)).unwrap();
        machine.serve().unwrap();
        let (reply, _) = machine.receive();
        assert_eq!(reply[HEADER..HEADER + 4], 64u32.to_ne_bytes());
    }

    #[test]
    fn a_message_may_come_in_pieces() {
        let mut machine = Machine::agreed();
        for byte in message(9, &access(CONFIG, 0, 2)) {
            machine.serve().unwrap();
            let waiting = machine.socket.read(&mut [0]).unwrap_err();
            assert_eq!(waiting.kind(), ErrorKind::WouldBlock);
            machine.socket.write_all(&[byte]).unwrap();
        }
        machine.serve().unwrap();
        assert_eq!(machine.reply().unwrap()[16..], [0xb3, 0x15]);
    }

    #[test]
    fn several_messages_may_come_at_once() {
        let mut machine = Machine::agreed();
        let one = message(9, &access(CONFIG, 0, 2));
        machine
            .socket
            .write_all(&[&one[..], &one, &one].concat())
            .unwrap();
        machine.serve().unwrap();
        let mut replies = [0; 128];
        assert_eq!(
            machine.socket.read(&mut replies).unwrap(),
            3 * (HEADER + 18)
        );
    }

    #[test]
    fn nothing_is_done_before_the_protocol_is_agreed_on() {
        let mut machine = Machine::new();
        assert_eq!(machine.ask(13, &[]), Err(Errno::PROTO));
        assert_eq!(machine.ask(1, &[1, 0, 0, 0]), Err(Errno::NOTSUP));
        assert_eq!(machine.ask(13, &[]), Err(Errno::PROTO));
        assert!(machine.ask(1, &[0; 4]).is_ok());
        assert_eq!(machine.ask(13, &[]), Ok(Vec::new()));
    }

    #[test]
    fn memory_is_there_until_it_is_taken_away() {
        let mut machine = Machine::agreed();
        machine.map(0x10_0000, 0x2000).unwrap();
        let written = machine.fabric.device(ID).dma.write(0x10_1ffe, &[1, 2]);
        assert_eq!(written, Ok(()));
        // Over what is there, or of no size.
        assert_eq!(machine.map(0x10_1000, 0x2000), Err(Errno::INVAL));
        assert_eq!(machine.map(0x20_0000, 0), Err(Errno::INVAL));
        assert_eq!(machine.map(u64::MAX - 0xfff, 0x2000), Err(Errno::INVAL));
        let body = Body::default()
            .u32(24)
            .u32(0)
            .u64(0x10_0000)
            .u64(0x2000)
            .finish();
        assert_eq!(machine.ask(3, &body).unwrap(), body);
        assert!(machine
            .fabric
            .device(ID)
            .dma
            .write(0x10_0000, &[1])
            .is_err());
    }

    #[test]
    fn a_file_is_for_the_message_that_it_came_with() {
        const NO_REPLY: u8 = 1 << 4;
        let mut machine = Machine::agreed();
        let mut before = message(9, &access(CONFIG, 0, 2));
        before[8] = NO_REPLY;
        machine.socket.write_all(&before).unwrap();
        machine.map(0x10_0000, 0x1000).unwrap();
        let written = machine.fabric.device(ID).dma.write(0x10_0000, &[1]);
        assert_eq!(written, Ok(()));
    }

    #[test]
    fn accesses_beyond_a_region_are_refused() {
        let mut machine = Machine::agreed();
        for (region, offset, count) in [
            (CONFIG, 4094, 4),
            (CONFIG, u64::MAX, 4),
            (BAR0, bar::SIZE, 1),
            (BAR0, 0, 0),
            (1, 0, 4),
            (REGIONS, 0, 4),
            (CONFIG, 0, u32::MAX),
        ] {
            assert_eq!(
                machine.ask(9, &access(region, offset, count)),
                Err(Errno::INVAL)
            );
        }
    }

    #[test]
    fn interrupts_that_do_not_exist_are_refused() {
        let mut machine = Machine::agreed();
        let eventfd = SET_EVENTFD | SET_TRIGGER;
        for (flags, index, start, count) in [
            (eventfd, MSIX, VECTORS as u32, 1),
            (eventfd, MSIX, u32::MAX, 2),
            (eventfd, 0, 0, 1),
            (eventfd, IRQS, 0, 0),
            (0, MSIX, 0, 1),
        ] {
            let body = Body::default()
                .u32(20)
                .u32(flags)
                .u32(index)
                .u32(start)
                .u32(count);
            assert_eq!(machine.ask(8, &body.finish()), Err(Errno::INVAL));
        }
    }

    #[test]
    fn whoever_does_not_read_answers_is_not_waited_for() {
        let mut machine = Machine::agreed();
        let read = message(9, &access(BAR0, 0, MAX_TRANSFER as u32));
        let gone = (0..1000).find_map(|_| {
            machine.socket.write_all(&read).unwrap();
            machine.serve().err()
        });
        assert!(gone.is_some());
    }

    #[test]
    fn nonsense_ends_the_connection() {
        let mut machine = Machine::agreed();
        machine.socket.write_all(&[0xff; 64]).unwrap();
        assert_eq!(machine.serve().unwrap_err().kind(), ErrorKind::InvalidData);
        let mut machine = Machine::agreed();
        machine.socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(
            machine.serve().unwrap_err().kind(),
            ErrorKind::ConnectionAborted
        );
    }
}
