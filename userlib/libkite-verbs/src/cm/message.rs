// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What the two ends of a connection tell each other to set it up and end it: the messages of InfiniBand's communication
//! management (volume 1, chapter 12), as far as kite needs them.
//!
//! One has 56 bytes and then the program's own data. All numbers are little-endian.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::header::rdma_conn_param;

/// Changes with the format.
const VERSION: u8 = 1;

/// Bytes before the program's data.
const HEADER: usize = 56;

/// Bytes that any message has at most.
pub(crate) const MESSAGE_MAX: usize = HEADER + u8::MAX as usize;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Active end to passive end, first of all: let us connect.
    Request = 1,
    /// Passive to active: yes.
    Reply,
    /// Active to passive: the connection is there.
    Ready,
    /// Either: no.
    Reject,
    /// Either: the connection is over.
    Leave,
    /// The answer to that.
    Left,
}

impl Kind {
    fn of(number: u8) -> Option<Self> {
        use Kind::*;
        let all = [Request, Reply, Ready, Reject, Leave, Left];
        all.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// What an end says of itself, as `rdma_conn_param` has it, and the program's data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    /// Number of its queue pair.
    pub(crate) qp: u32,
    pub(crate) data: Vec<u8>,
}

impl Said {
    /// As the other end sees it: what one reads, the other has read. The data stays where it is.
    pub(crate) fn seen(&self) -> rdma_conn_param {
        rdma_conn_param {
            private_data: match self.data.is_empty() {
                true => std::ptr::null(),
                false => self.data.as_ptr().cast(),
            },
            private_data_len: self.data.len() as u8,
            responder_resources: self.initiator_depth,
            initiator_depth: self.responder_resources,
            flow_control: self.flow_control,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            srq: self.srq,
            qp_num: self.qp,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    /// Of a rejection, as InfiniBand numbers them.
    pub(crate) reason: u8,
    pub(crate) said: Said,
    /// Of a request, where the active and the passive end are.
    pub(crate) ends: [SocketAddr; 2],
}

/// No address.
pub(crate) const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

impl Message {
    pub(crate) fn new(kind: Kind, said: Said) -> Self {
        Self {
            kind,
            reason: 0,
            said,
            ends: [NOWHERE; 2],
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let said = &self.said;
        let mut bytes = vec![
            VERSION,
            self.kind as u8,
            self.reason,
            said.responder_resources,
            said.initiator_depth,
            said.flow_control,
            said.retry_count,
            said.rnr_retry_count,
            said.srq,
            0,
            0,
            0,
        ];
        bytes.extend(said.qp.to_le_bytes());
        for end in self.ends {
            let ip = match end.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            bytes.extend(ip.octets());
            bytes.extend(end.port().to_le_bytes());
            bytes.extend([0, 0]);
        }
        bytes.extend(&said.data);
        bytes
    }

    /// The message that bytes are, if they are one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, data) = bytes.split_at_checked(HEADER)?;
        let &[VERSION, kind, reason, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq, ..] =
            header
        else {
            return None;
        };
        let said = Said {
            responder_resources,
            initiator_depth,
            flow_control,
            retry_count,
            rnr_retry_count,
            srq,
            qp: u32::from_le_bytes(header[12..16].try_into().ok()?),
            data: data.to_vec(),
        };
        Some(Self {
            kind: Kind::of(kind)?,
            reason,
            said,
            ends: [end(&header[16..36])?, end(&header[36..])?],
        })
    }
}

/// Where an end is: 16 bytes, two, and two that are free.
fn end(bytes: &[u8]) -> Option<SocketAddr> {
    let ip: [u8; 16] = bytes[..16].try_into().ok()?;
    let port = u16::from_le_bytes(bytes[16..18].try_into().ok()?);
    let ip = IpAddr::from(Ipv6Addr::from(ip)).to_canonical();
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(data: &[u8]) -> Message {
        Message {
            kind: Kind::Request,
            reason: 3,
            said: Said {
                responder_resources: 1,
                initiator_depth: 2,
                flow_control: 3,
                retry_count: 4,
                rnr_retry_count: 5,
                srq: 6,
                qp: 0xabcdef,
                data: data.to_vec(),
            },
            ends: [
                "10.1.2.3:4".parse().unwrap(),
                "[fe80::1]:65535".parse().unwrap(),
            ],
        }
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        for len in [0, 1, 255] {
            let message = request(&vec![9; len]);
            let bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_MAX);
            assert_eq!(Message::decode(&bytes), Some(message));
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let bytes = request(b"").encode();
        assert_eq!(Message::decode(&bytes[..HEADER - 1]), None);
        for (at, wrong) in [(0, VERSION + 1), (1, 0), (1, 7)] {
            let mut bytes = bytes.clone();
            bytes[at] = wrong;
            assert_eq!(Message::decode(&bytes), None, "{at}: {wrong}");
        }
    }

    #[test]
    fn what_one_end_reads_the_other_has_read() {
        let seen = request(b"").said.seen();
        assert_eq!((seen.responder_resources, seen.initiator_depth), (2, 1));
    }
}
