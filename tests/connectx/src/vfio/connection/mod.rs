// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Connection of one machine to its device: receives the requests of the machine, and sends the replies.
//!
//! `region` and `interrupt` handle the requests for parts of the PCI device.

mod interrupt;
mod region;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tracing::debug;

use super::codec::{Header, ReplyBody, VfioRequest, HEADER, MAX_BODY, MAX_FDS};
use crate::device::{Device, DeviceId};
use crate::fabric::Fabric;
use crate::pci::PciConfig;
use interrupt::KINDS;
use region::{BAR0, REGIONS};

/// Access of the device to a region, and to memory of the machine.
const READABLE: u32 = 1;
const WRITABLE: u32 = 2;

const DEVICE_RESETS: u32 = 1;
const DEVICE_IS_PCI: u32 = 2;

const VERSION: &[u8] = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":65536}}\0";

/// Connection of one machine.
#[derive(Debug)]
pub struct VfioConnection {
    id: DeviceId,
    socket: UnixStream,
    /// Receive buffer for the longest message.
    buffer: Vec<u8>,
    /// Number of received bytes in the buffer.
    filled: usize,
    /// Received files, in order, each with the end of its bytes in the buffer.
    files: Vec<(usize, OwnedFd)>,
    is_negotiated: bool,
}

impl VfioConnection {
    /// Returns a connection on the socket of a machine.
    pub fn new(id: DeviceId, socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(VfioConnection {
            id,
            socket,
            buffer: vec![0; HEADER + MAX_BODY],
            filled: 0,
            files: Vec::new(),
            is_negotiated: false,
        })
    }

    /// Returns the socket, for poll.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives and executes requests, up to the size of the buffer. An error ends the connection.
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
        let request = VfioRequest::decode(header.command, body);
        let outcome = request.and_then(|request| self.execute_request(fabric, request, files));
        if let Err(errno) = outcome {
            debug!(device = self.id.0, command = header.command, %errno, "request rejected");
        }
        let attached = match (&request, &outcome) {
            (Ok(VfioRequest::RegionInfo { index: BAR0, .. }), Ok(_)) => {
                fabric.device(self.id).doorbells.as_ref()
            }
            _ => None,
        };
        match header.reply(outcome) {
            Some(reply) => self.send(&reply, attached),
            None => Ok(()),
        }
    }

    /// Receives as many bytes as the buffer has room for: one call per message would dominate the cost of a doorbell.
    /// `recvmsg` returns after the bytes that files belong to, and a message with files is sent alone. The files
    /// therefore belong to the message of the last byte.
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

    /// Sends a reply. Fails if the socket has no room: a machine that reads no replies must not block the device.
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

    /// Executes a request. Returns the body of the reply.
    fn execute_request(
        &mut self,
        fabric: &mut Fabric,
        request: VfioRequest<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Errno> {
        if let VfioRequest::Version { major, .. } = request {
            self.is_negotiated = major == 0;
            let version = ReplyBody::default().u32(0).bytes(VERSION).finish();
            return self.is_negotiated.then_some(version).ok_or(Errno::NOTSUP);
        }
        if !self.is_negotiated {
            return Err(Errno::PROTO);
        }
        let device = fabric.device(self.id);
        match request {
            VfioRequest::Version { .. } => Err(Errno::INVAL),
            VfioRequest::DmaMap { .. } => map(device, request, fds),
            VfioRequest::DmaUnmap {
                address,
                size,
                echo,
            } => {
                device.dma.unmap(address, size);
                Ok(echo.into())
            }
            VfioRequest::DeviceInfo => Ok(device_info()),
            VfioRequest::RegionInfo { room, index } => {
                let mappable = index == BAR0 && device.doorbells.is_some();
                region::info(room, index, mappable)
            }
            VfioRequest::IrqInfo { index } => interrupt::info(index),
            VfioRequest::SetIrqs { .. } => interrupt::set(device, request, fds),
            VfioRequest::RegionRead {
                offset,
                region,
                count,
            } => region::read(fabric, self.id, region, offset, count),
            VfioRequest::RegionWrite {
                offset,
                region,
                data,
            } => region::write(fabric, self.id, region, offset, data),
            VfioRequest::Reset => {
                device.reset();
                device.pci = PciConfig::default();
                Ok(Vec::new())
            }
        }
    }
}

/// Returns header and body of the first message, if the message is complete.
fn first(bytes: &[u8]) -> io::Result<Option<(Header, &[u8])>> {
    let Some(header) = bytes.first_chunk() else {
        return Ok(None);
    };
    let header = Header::decode(header).ok_or(io::ErrorKind::InvalidData)?;
    let body = bytes.get(HEADER..header.size as usize);
    Ok(body.map(|body| (header, body)))
}

/// Maps memory of the machine. Memory without a file belongs to another device and is ignored.
fn map(device: &mut Device, request: VfioRequest<'_>, fds: Vec<OwnedFd>) -> Result<Vec<u8>, Errno> {
    let VfioRequest::DmaMap {
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
    let body = ReplyBody::default()
        .u32(16)
        .u32(DEVICE_RESETS | DEVICE_IS_PCI);
    body.u32(REGIONS).u32(KINDS).finish()
}
