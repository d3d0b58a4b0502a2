// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Execution of requests on the memory and the receives of the responder.

use super::atomic::apply;
use super::state::{Delivery, Message, ReadProgress, Response};
use super::{advance_reth, Responder};
use crate::engine::{key_memory, page_fault, receive_pd};
use crate::network::packet::{Atomic, Nak, Packet, PacketBody, Position, Psn, Reth, Tail};
use crate::object::cq::{Completion, CqeKind, Syndrome};
use crate::object::eq::QpEvent;
use crate::object::mkey::{self, Access, MkeyFault, User};
use crate::object::receive::{self, ReceiveWqe};
use crate::object::scatter::capacity;

/// Reason for which the responder does not execute a request.
pub(super) enum Rejection {
    /// No receive is posted, or a page is absent. The request had no effect, and the requester must retry.
    NotReady,
    /// The request is invalid: this NAK ends the connection. The event, if any, is raised.
    Final(Nak, Option<QpEvent>),
}

impl Rejection {
    const INVALID: Rejection = Rejection::Final(Nak::InvalidRequest, Some(QpEvent::InvalidRequest));
    const ACCESS: Rejection = Rejection::Final(Nak::RemoteAccess, Some(QpEvent::AccessError));
    const OPERATION: Rejection =
        Rejection::Final(Nak::RemoteOperation, Some(QpEvent::Catastrophic));
}

impl Responder<'_> {
    pub(super) fn execute_request(&mut self, packet: &Packet) -> Result<(), Rejection> {
        if self.context.pd.is_none() {
            return Err(Rejection::INVALID);
        }
        match packet.body {
            PacketBody::Send(position, tail) => self.execute_send(packet, position, tail),
            PacketBody::Write(position, reth, tail) => {
                self.execute_write(packet, position, reth, tail)
            }
            _ if !self.context.reliable
                || self.state.pending_data_responses() >= self.context.max_reads =>
            {
                Err(Rejection::INVALID)
            }
            PacketBody::ReadRequest(reth) => self.execute_read(packet.psn, reth),
            PacketBody::Atomic(atomic) => self.execute_atomic(packet.psn, atomic),
            _ => Err(Rejection::INVALID),
        }
    }

    /// Checks that a packet starts a message if and only if no message is in progress, and that all packets but the
    /// last have the size of the MTU.
    fn check_framing(&self, packet: &Packet, position: Position) -> Result<(), Rejection> {
        let mtu = self.context.peer.mtu as usize;
        let fits = match position.ends() {
            true => packet.payload.len() <= mtu,
            false => packet.payload.len() == mtu,
        };
        match fits && position.begins() == self.state.message.is_none() {
            true => Ok(()),
            false => Err(Rejection::INVALID),
        }
    }

    fn execute_send(
        &mut self,
        packet: &Packet,
        position: Position,
        tail: Tail,
    ) -> Result<(), Rejection> {
        self.check_framing(packet, position)?;
        let (wqe, before) = match self.state.message.take() {
            None => (self.take_receive()?, 0),
            Some(Message::Send(wqe, before)) => (wqe, before),
            Some(Message::Write(..)) => return Err(Rejection::INVALID),
        };
        let received = before + packet.payload.len() as u64;
        let inline = self.fits_cqe(position, packet);
        if received > capacity(&wqe.segments) {
            self.complete_in_error(&wqe, packet, Syndrome::LocalLength);
            return Err(Rejection::Final(Nak::InvalidRequest, None));
        }
        let stored = match inline {
            true => Ok(()),
            false => self.scatter_to_receive(&wqe, before, &packet.payload),
        };
        if let Err(fault) = stored {
            return Err(self.reject_receive_fault(wqe, before, packet, fault));
        }
        if !position.ends() {
            self.state.message = Some(Message::Send(wqe, received));
            return Ok(());
        }
        if let Tail::Invalidate(key) = tail {
            if self.invalidate_key(key).is_none() {
                self.complete_in_error(&wqe, packet, Syndrome::LocalAccess);
                return Err(Rejection::Final(Nak::RemoteAccess, None));
            }
        }
        let (kind, immediate) = match tail {
            Tail::None => (CqeKind::ReceiveSend, 0),
            Tail::Immediate(data) => (CqeKind::ReceiveSendImmediate, data),
            Tail::Invalidate(key) => (CqeKind::ReceiveSendInvalidate, key),
        };
        let completion = Completion {
            kind,
            immediate,
            byte_count: received as u32,
            inline: if inline {
                packet.payload.clone()
            } else {
                Vec::new()
            },
            ..self.new_completion(&wqe, packet)
        };
        self.device.complete(self.context.cqn, completion);
        Ok(())
    }

    fn execute_write(
        &mut self,
        packet: &Packet,
        position: Position,
        reth: Option<Reth>,
        tail: Tail,
    ) -> Result<(), Rejection> {
        self.check_framing(packet, position)?;
        let (left, total) = match (&self.state.message, reth) {
            (None, Some(reth)) => (self.check_write(position, reth)?, reth.length),
            (&Some(Message::Write(left, total)), None) => (left, total),
            _ => return Err(Rejection::INVALID),
        };
        let length = packet.payload.len() as u32;
        if length > left.length || position.ends() != (length == left.length) {
            return Err(Rejection::INVALID);
        }
        let user = self.key_user(Access::RemoteWrite);
        key_memory(self.device)
            .write(left.key, user, left.address, &packet.payload)
            .map_err(|fault| self.reject_key_fault(fault))?;
        if let (true, Tail::Immediate(data)) = (position.ends(), tail) {
            let wqe = self.take_receive()?;
            let completion = Completion {
                kind: CqeKind::ReceiveWriteImmediate,
                immediate: data,
                byte_count: total,
                ..self.new_completion(&wqe, packet)
            };
            self.device.complete(self.context.cqn, completion);
        }
        let rest = Message::Write(advance_reth(left, length), total);
        self.state.message = (!position.ends()).then_some(rest);
        Ok(())
    }

    fn execute_read(&mut self, psn: Psn, reth: Reth) -> Result<(), Rejection> {
        if self.state.message.is_some() {
            return Err(Rejection::INVALID);
        }
        self.check_read(&reth)?;
        self.queue_read_response(psn, reth, Delivery::First);
        Ok(())
    }

    fn execute_atomic(&mut self, psn: Psn, atomic: Atomic) -> Result<(), Rejection> {
        if self.state.message.is_some() || atomic.address % u64::from(atomic.size) != 0 {
            return Err(Rejection::INVALID);
        }
        if !self.context.rights.atomic {
            return Err(Rejection::ACCESS);
        }
        let found = self
            .apply_atomic(&atomic)
            .map_err(|fault| self.reject_key_fault(fault))?;
        self.count(|count| count.atomics += 1);
        self.state.save_atomic_result(psn, found);
        self.state
            .queue_response(Response::Atomic(psn, found, Delivery::First));
        Ok(())
    }

    /// Executes an atomic operation, in little-endian byte order. Returns the previous value.
    fn apply_atomic(&mut self, atomic: &Atomic) -> Result<u64, MkeyFault> {
        let user = self.key_user(Access::RemoteAtomic);
        let size = usize::from(atomic.size);
        let mut bytes = [0; 8];
        let mut memory = key_memory(self.device);
        memory.read(atomic.key, user, atomic.address, &mut bytes[..size])?;
        let found = u64::from_le_bytes(bytes);
        let new = apply(atomic.operation, found).to_le_bytes();
        memory.write(atomic.key, user, atomic.address, &new[..size])?;
        Ok(found)
    }

    /// Returns the rejection of a request that faults in the memory that it addresses.
    fn reject_key_fault(&mut self, fault: MkeyFault) -> Rejection {
        match page_fault::request_absent(self.device, self.context.number, fault) {
            true => Rejection::NotReady,
            false => Rejection::ACCESS,
        }
    }

    /// Returns the rejection of a SEND packet that faults in the memory of its receive. `before` is the number of
    /// message bytes in earlier packets.
    fn reject_receive_fault(
        &mut self,
        wqe: ReceiveWqe,
        before: u64,
        packet: &Packet,
        fault: MkeyFault,
    ) -> Rejection {
        if page_fault::request_absent(self.device, self.context.number, fault) {
            match before {
                0 => self.state.unused_receive = Some(wqe),
                _ => self.state.message = Some(Message::Send(wqe, before)),
            }
            return Rejection::NotReady;
        }
        self.complete_in_error(&wqe, packet, Syndrome::LocalProtection);
        Rejection::Final(Nak::RemoteOperation, None)
    }

    /// Checks that a READ is permitted.
    pub(super) fn check_read(&mut self, reth: &Reth) -> Result<(), Rejection> {
        let user = self.key_user(Access::RemoteRead);
        let length = u64::from(reth.length);
        let checked = key_memory(self.device).check(reth.key, user, reth.address, length);
        match self.context.rights.read && checked.is_ok() {
            true => Ok(()),
            false => Err(Rejection::ACCESS),
        }
    }

    /// Checks that a WRITE is permitted. The memory of a WRITE of a single packet is checked by the write itself.
    fn check_write(&mut self, position: Position, reth: Reth) -> Result<Reth, Rejection> {
        let user = self.key_user(Access::RemoteWrite);
        let length = u64::from(reth.length);
        let allowed = position.ends()
            || key_memory(self.device)
                .check(reth.key, user, reth.address, length)
                .is_ok();
        match self.context.rights.write && allowed {
            true => Ok(reth),
            false => Err(Rejection::ACCESS),
        }
    }

    pub(super) fn queue_read_response(&mut self, psn: Psn, reth: Reth, delivery: Delivery) {
        let user = self.key_user(Access::RemoteRead);
        self.state.queue_response(Response::Read(ReadProgress {
            psn,
            rest: reth,
            user,
            delivery,
            min_rnr_nak: self.context.min_rnr_nak,
        }));
    }

    fn key_user(&self, access: Access) -> User {
        User {
            pd: self.context.pd.unwrap_or(u32::MAX),
            qp: self.context.number,
            access,
        }
    }

    /// Takes the receive of an aborted message, or the next posted receive.
    fn take_receive(&mut self) -> Result<ReceiveWqe, Rejection> {
        if let Some(wqe) = self.state.unused_receive.take() {
            return Ok(wqe);
        }
        receive::take(self.device, self.receive)
            .map_err(|_| Rejection::OPERATION)?
            .ok_or(Rejection::NotReady)
    }

    /// Returns `true` if the data of the message is placed in the CQE.
    fn fits_cqe(&self, position: Position, packet: &Packet) -> bool {
        let length = packet.payload.len();
        position == Position::Only && length > 0 && length <= usize::from(self.context.scatter)
    }

    fn scatter_to_receive(
        &mut self,
        wqe: &ReceiveWqe,
        skip: u64,
        bytes: &[u8],
    ) -> Result<(), MkeyFault> {
        let user = self.key_user(Access::LocalWrite);
        let pd = receive_pd(self.device, self.receive, user.pd);
        key_memory(self.device).scatter(pd, user.qp, &wqe.segments, skip, bytes)
    }

    /// Invalidates a memory key for a SEND with invalidate.
    fn invalidate_key(&mut self, key: u32) -> Option<()> {
        let keys = &mut self.device.objects.mkeys;
        mkey::invalidate(keys, key, self.context.pd?, self.context.number).ok()
    }

    /// Returns the completion of a receive, without kind and data.
    fn new_completion(&self, wqe: &ReceiveWqe, packet: &Packet) -> Completion {
        Completion {
            qpn: self.context.number,
            user_index: self.context.user_index,
            wqe_counter: wqe.index,
            source_qpn: self.context.source,
            source_lid: packet.path.source,
            service_level: packet.path.service_level,
            solicited: packet.solicited,
            ..Completion::default()
        }
    }

    fn complete_in_error(&mut self, wqe: &ReceiveWqe, packet: &Packet, syndrome: Syndrome) {
        self.state.failed = true;
        let completion = Completion {
            kind: CqeKind::ReceiveError,
            syndrome,
            ..self.new_completion(wqe, packet)
        };
        self.device.complete(self.context.cqn, completion);
    }
}
