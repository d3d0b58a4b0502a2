// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Tests of a connection against the messages of a machine.

use std::io::{ErrorKind, Read, Write};

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

use super::interrupt::{MSIX, SET_EVENTFD, SET_TRIGGER};
use super::region::CONFIG;
use super::*;
use crate::bar;
use crate::interrupts::VECTORS;
use crate::vfio::codec::{message, MAX_TRANSFER};

const ID: DeviceId = DeviceId(0);

/// Connected machine, and the connection at the device.
struct VfioClient {
    socket: UnixStream,
    connection: VfioConnection,
    fabric: Fabric,
}

impl VfioClient {
    fn new() -> Self {
        let (socket, served) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        VfioClient {
            socket,
            connection: VfioConnection::new(ID, served).unwrap(),
            fabric: Fabric::new(1),
        }
    }

    fn negotiated() -> Self {
        let mut machine = VfioClient::new();
        machine.request(1, &[0; 4]).unwrap();
        machine
    }

    fn serve(&mut self) -> io::Result<()> {
        self.connection.serve(&mut self.fabric)
    }

    /// Sends a request and returns the body of the reply.
    fn request(&mut self, command: u16, body: &[u8]) -> Result<Vec<u8>, Errno> {
        self.request_with_files(command, body, &[])
    }

    fn request_with_files(
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

    /// Receives a message of the device, and its files.
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
        let body = ReplyBody::default().u32(32).u32(READABLE | WRITABLE);
        let body = body.u64(0).u64(address).u64(size).finish();
        self.request_with_files(2, &body, &[file.as_fd()])
    }
}

fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    ReplyBody::default()
        .u64(offset)
        .u32(region)
        .u32(count)
        .finish()
}

#[test]
fn config_space_and_bar_size_are_readable() {
    let mut machine = VfioClient::negotiated();
    let reply = machine.request(9, &access(CONFIG, 0, 4)).unwrap();
    assert_eq!(reply[16..], [0xb3, 0x15, 0x19, 0x10]);
    let info = machine
        .request(5, &ReplyBody::default().u32(32).u32(0).u32(BAR0).finish())
        .unwrap();
    assert_eq!(info[16..24], bar::SIZE.to_ne_bytes());
}

#[test]
fn region_info_offers_mapping_of_doorbells_only() {
    const FD: usize = HEADER + 64;
    let mut machine = VfioClient::negotiated();
    machine.fabric.map_doorbells().unwrap();
    let request = |room: u32| message(5, &ReplyBody::default().u32(room).u32(0).u32(BAR0).finish());
    machine.socket.write_all(&request(64)).unwrap();
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
    machine.socket.write_all(&request(32)).unwrap();
    machine.serve().unwrap();
    let (reply, _) = machine.receive();
    assert_eq!(reply[HEADER..HEADER + 4], 64u32.to_ne_bytes());
}

#[test]
fn message_in_pieces_is_answered_once_complete() {
    let mut machine = VfioClient::negotiated();
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
fn messages_in_one_read_are_all_answered() {
    let mut machine = VfioClient::negotiated();
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
fn request_before_version_is_rejected() {
    let mut machine = VfioClient::new();
    assert_eq!(machine.request(13, &[]), Err(Errno::PROTO));
    assert_eq!(machine.request(1, &[1, 0, 0, 0]), Err(Errno::NOTSUP));
    assert_eq!(machine.request(13, &[]), Err(Errno::PROTO));
    assert!(machine.request(1, &[0; 4]).is_ok());
    assert_eq!(machine.request(13, &[]), Ok(Vec::new()));
}

#[test]
fn mapped_memory_is_usable_until_unmapped() {
    let mut machine = VfioClient::negotiated();
    machine.map(0x10_0000, 0x2000).unwrap();
    let written = machine.fabric.device(ID).dma.write(0x10_1ffe, &[1, 2]);
    assert_eq!(written, Ok(()));
    // Mappings that overlap an existing mapping, or have no size.
    assert_eq!(machine.map(0x10_1000, 0x2000), Err(Errno::INVAL));
    assert_eq!(machine.map(0x20_0000, 0), Err(Errno::INVAL));
    assert_eq!(machine.map(u64::MAX - 0xfff, 0x2000), Err(Errno::INVAL));
    let body = ReplyBody::default()
        .u32(24)
        .u32(0)
        .u64(0x10_0000)
        .u64(0x2000)
        .finish();
    assert_eq!(machine.request(3, &body).unwrap(), body);
    assert!(machine
        .fabric
        .device(ID)
        .dma
        .write(0x10_0000, &[1])
        .is_err());
}

#[test]
fn file_belongs_to_its_own_message() {
    const NO_REPLY: u8 = 1 << 4;
    let mut machine = VfioClient::negotiated();
    let mut before = message(9, &access(CONFIG, 0, 2));
    before[8] = NO_REPLY;
    machine.socket.write_all(&before).unwrap();
    machine.map(0x10_0000, 0x1000).unwrap();
    let written = machine.fabric.device(ID).dma.write(0x10_0000, &[1]);
    assert_eq!(written, Ok(()));
}

#[test]
fn access_beyond_region_is_rejected() {
    let mut machine = VfioClient::negotiated();
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
            machine.request(9, &access(region, offset, count)),
            Err(Errno::INVAL)
        );
    }
}

#[test]
fn unknown_interrupt_is_rejected() {
    let mut machine = VfioClient::negotiated();
    let eventfd = SET_EVENTFD | SET_TRIGGER;
    for (flags, index, start, count) in [
        (eventfd, MSIX, VECTORS as u32, 1),
        (eventfd, MSIX, u32::MAX, 2),
        (eventfd, 0, 0, 1),
        (eventfd, KINDS, 0, 0),
        (0, MSIX, 0, 1),
    ] {
        let body = ReplyBody::default()
            .u32(20)
            .u32(flags)
            .u32(index)
            .u32(start)
            .u32(count);
        assert_eq!(machine.request(8, &body.finish()), Err(Errno::INVAL));
    }
}

#[test]
fn machine_not_reading_replies_is_disconnected() {
    let mut machine = VfioClient::negotiated();
    let read = message(9, &access(BAR0, 0, MAX_TRANSFER as u32));
    let disconnected = (0..1000).find_map(|_| {
        machine.socket.write_all(&read).unwrap();
        machine.serve().err()
    });
    assert!(disconnected.is_some());
}

#[test]
fn invalid_message_or_shutdown_ends_connection() {
    let mut machine = VfioClient::negotiated();
    machine.socket.write_all(&[0xff; 64]).unwrap();
    assert_eq!(machine.serve().unwrap_err().kind(), ErrorKind::InvalidData);
    let mut machine = VfioClient::negotiated();
    machine.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(
        machine.serve().unwrap_err().kind(),
        ErrorKind::ConnectionAborted
    );
}
