// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Execution of requests on the memory and the receives of the receiver.

use super::atomic::apply;
use super::state::{Message, Reading, Response, Turn};
use super::{advance, Responder};
use crate::engine::{local_domain, page_fault, reach};
use crate::network::packet::{Atomic, Nak, Packet, PacketBody, Position, Psn, Reth, Tail};
use crate::object::cq::{Completion, CqeKind, Syndrome};
use crate::object::eq::QpEvent;
use crate::object::mkey::{self, Access, MkeyFault, User};
use crate::object::receive::{self, ReceiveWqe};
use crate::object::scatter::capacity;

/// Reason for which a request is not executed.
pub(super) enum Rejection {
    /// No receive is posted, or memory is absent. The request has had no effect.
    NotReady,
    /// The request is invalid: the connection ends with this NAK, and with the event if there is one.
    Final(Nak, Option<QpEvent>),
}

impl Rejection {
    const INVALID: Rejection = Rejection::Final(Nak::InvalidRequest, Some(QpEvent::InvalidRequest));
    const ACCESS: Rejection = Rejection::Final(Nak::RemoteAccess, Some(QpEvent::AccessError));
    const OPERATION: Rejection =
        Rejection::Final(Nak::RemoteOperation, Some(QpEvent::Catastrophic));
}

impl Responder<'_> {
    pub(super) fn execute(&mut self, packet: &Packet) -> Result<(), Rejection> {
        if self.target.pd.is_none() {
            return Err(Rejection::INVALID);
        }
        match packet.body {
            PacketBody::Send(position, tail) => self.send(packet, position, tail),
            PacketBody::Write(position, reth, tail) => self.write(packet, position, reth, tail),
            _ if !self.target.reliable || self.state.unanswered() >= self.target.reads => {
                Err(Rejection::INVALID)
            }
            PacketBody::ReadRequest(reth) => self.read(packet.psn, reth),
            PacketBody::Atomic(atomic) => self.atomic(packet.psn, atomic),
            _ => Err(Rejection::INVALID),
        }
    }

    /// Checks that a packet begins a message if and only if no message is in progress, and that a packet which does not
    /// end its message is full.
    fn check_shape(&self, packet: &Packet, position: Position) -> Result<(), Rejection> {
        let mtu = self.target.peer.mtu as usize;
        let fits = match position.ends() {
            true => packet.payload.len() <= mtu,
            false => packet.payload.len() == mtu,
        };
        match fits && position.begins() == self.state.message.is_none() {
            true => Ok(()),
            false => Err(Rejection::INVALID),
        }
    }

    fn send(&mut self, packet: &Packet, position: Position, tail: Tail) -> Result<(), Rejection> {
        self.check_shape(packet, position)?;
        let (wqe, before) = match self.state.message.take() {
            None => (self.take()?, 0),
            Some(Message::Send(wqe, before)) => (wqe, before),
            Some(Message::Write(..)) => return Err(Rejection::INVALID),
        };
        let received = before + packet.payload.len() as u64;
        let inline = self.fits_completion(position, packet);
        if received > capacity(&wqe.segments) {
            self.fail(&wqe, packet, Syndrome::LocalLength);
            return Err(Rejection::Final(Nak::InvalidRequest, None));
        }
        let stored = match inline {
            true => Ok(()),
            false => self.scatter(&wqe, before, &packet.payload),
        };
        if let Err(fault) = stored {
            return Err(self.not_stored(wqe, before, packet, fault));
        }
        if !position.ends() {
            self.state.message = Some(Message::Send(wqe, received));
            return Ok(());
        }
        if let Tail::Invalidate(key) = tail {
            if self.invalidate(key).is_none() {
                self.fail(&wqe, packet, Syndrome::LocalAccess);
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
            ..self.completion(&wqe, packet)
        };
        self.device.complete(self.target.cqn, completion);
        Ok(())
    }

    fn write(
        &mut self,
        packet: &Packet,
        position: Position,
        reth: Option<Reth>,
        tail: Tail,
    ) -> Result<(), Rejection> {
        self.check_shape(packet, position)?;
        let (left, total) = match (&self.state.message, reth) {
            (None, Some(reth)) => (self.may_write(position, reth)?, reth.length),
            (&Some(Message::Write(left, total)), None) => (left, total),
            _ => return Err(Rejection::INVALID),
        };
        let length = packet.payload.len() as u32;
        if length > left.length || position.ends() != (length == left.length) {
            return Err(Rejection::INVALID);
        }
        let user = self.user(Access::RemoteWrite);
        reach(self.device)
            .write(left.key, user, left.address, &packet.payload)
            .map_err(|fault| self.denied(fault))?;
        if let (true, Tail::Immediate(data)) = (position.ends(), tail) {
            let wqe = self.take()?;
            let completion = Completion {
                kind: CqeKind::ReceiveWriteImmediate,
                immediate: data,
                byte_count: total,
                ..self.completion(&wqe, packet)
            };
            self.device.complete(self.target.cqn, completion);
        }
        let rest = Message::Write(advance(left, length), total);
        self.state.message = (!position.ends()).then_some(rest);
        Ok(())
    }

    fn read(&mut self, psn: Psn, reth: Reth) -> Result<(), Rejection> {
        if self.state.message.is_some() {
            return Err(Rejection::INVALID);
        }
        self.may_read(&reth)?;
        self.reply_read(psn, reth, Turn::First);
        Ok(())
    }

    fn atomic(&mut self, psn: Psn, atomic: Atomic) -> Result<(), Rejection> {
        if self.state.message.is_some() || atomic.address % u64::from(atomic.size) != 0 {
            return Err(Rejection::INVALID);
        }
        if !self.target.rights.atomic {
            return Err(Rejection::ACCESS);
        }
        let found = self.operate(&atomic).map_err(|fault| self.denied(fault))?;
        self.count(|count| count.atomics += 1);
        self.state.keep(psn, found);
        self.state.reply(Response::Atomic(psn, found, Turn::First));
        Ok(())
    }

    /// Executes an atomic operation, in little-endian byte order. Returns the previous value.
    fn operate(&mut self, atomic: &Atomic) -> Result<u64, MkeyFault> {
        let user = self.user(Access::RemoteAtomic);
        let size = usize::from(atomic.size);
        let mut bytes = [0; 8];
        let mut memory = reach(self.device);
        memory.read(atomic.key, user, atomic.address, &mut bytes[..size])?;
        let found = u64::from_le_bytes(bytes);
        let new = apply(atomic.operation, found).to_le_bytes();
        memory.write(atomic.key, user, atomic.address, &new[..size])?;
        Ok(found)
    }

    /// Returns the response to a request after a fault in memory that the request addresses.
    fn denied(&mut self, fault: MkeyFault) -> Rejection {
        match page_fault::waits(self.device, self.target.number, fault) {
            true => Rejection::NotReady,
            false => Rejection::ACCESS,
        }
    }

    /// Returns the response to a message after a fault in the memory of its receive. `before` bytes of the message
    /// arrived before.
    fn not_stored(
        &mut self,
        wqe: ReceiveWqe,
        before: u64,
        packet: &Packet,
        fault: MkeyFault,
    ) -> Rejection {
        if page_fault::waits(self.device, self.target.number, fault) {
            match before {
                0 => self.state.spare = Some(wqe),
                _ => self.state.message = Some(Message::Send(wqe, before)),
            }
            return Rejection::NotReady;
        }
        self.fail(&wqe, packet, Syndrome::LocalProtection);
        Rejection::Final(Nak::RemoteOperation, None)
    }

    pub(super) fn may_read(&mut self, reth: &Reth) -> Result<(), Rejection> {
        let user = self.user(Access::RemoteRead);
        let length = u64::from(reth.length);
        let checked = reach(self.device).check(reth.key, user, reth.address, length);
        match self.target.rights.read && checked.is_ok() {
            true => Ok(()),
            false => Err(Rejection::ACCESS),
        }
    }

    /// Checks that a WRITE may begin. The memory of a single packet is checked when it is written.
    fn may_write(&mut self, position: Position, reth: Reth) -> Result<Reth, Rejection> {
        let user = self.user(Access::RemoteWrite);
        let length = u64::from(reth.length);
        let allowed = position.ends()
            || reach(self.device)
                .check(reth.key, user, reth.address, length)
                .is_ok();
        match self.target.rights.write && allowed {
            true => Ok(reth),
            false => Err(Rejection::ACCESS),
        }
    }

    pub(super) fn reply_read(&mut self, psn: Psn, reth: Reth, turn: Turn) {
        let user = self.user(Access::RemoteRead);
        self.state.reply(Response::Read(Reading {
            psn,
            rest: reth,
            user,
            turn,
            min_rnr_nak: self.target.min_rnr_nak,
        }));
    }

    fn user(&self, access: Access) -> User {
        User {
            pd: self.target.pd.unwrap_or(u32::MAX),
            qp: self.target.number,
            access,
        }
    }

    /// Takes a receive.
    fn take(&mut self) -> Result<ReceiveWqe, Rejection> {
        if let Some(wqe) = self.state.spare.take() {
            return Ok(wqe);
        }
        receive::take(self.device, self.receive)
            .map_err(|_| Rejection::OPERATION)?
            .ok_or(Rejection::NotReady)
    }

    /// Returns `true` if the completion holds the data of the message.
    fn fits_completion(&self, position: Position, packet: &Packet) -> bool {
        let length = packet.payload.len();
        position == Position::Only && length > 0 && length <= usize::from(self.target.scatter)
    }

    fn scatter(&mut self, wqe: &ReceiveWqe, skip: u64, bytes: &[u8]) -> Result<(), MkeyFault> {
        let user = self.user(Access::LocalWrite);
        let pd = local_domain(self.device, self.receive, user.pd);
        reach(self.device).scatter(pd, user.qp, &wqe.segments, skip, bytes)
    }

    /// Invalidates a memory key for a SEND with invalidate.
    fn invalidate(&mut self, key: u32) -> Option<()> {
        let keys = &mut self.device.objects.mkeys;
        mkey::invalidate(keys, key, self.target.pd?, self.target.number).ok()
    }

    /// Returns the completion of a receive, without kind and data.
    fn completion(&self, wqe: &ReceiveWqe, packet: &Packet) -> Completion {
        Completion {
            qpn: self.target.number,
            user_index: self.target.user_index,
            wqe_counter: wqe.index,
            source_qpn: self.target.source,
            source_lid: packet.path.source,
            service_level: packet.path.service_level,
            solicited: packet.solicited,
            ..Completion::default()
        }
    }

    fn fail(&mut self, wqe: &ReceiveWqe, packet: &Packet, syndrome: Syndrome) {
        self.state.failed = true;
        let completion = Completion {
            kind: CqeKind::ReceiveError,
            syndrome,
            ..self.completion(wqe, packet)
        };
        self.device.complete(self.target.cqn, completion);
    }
}
