// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Messages by which two ends set up and end a connection: those of the communication management of InfiniBand (volume
//! 1, chapter 12) that kite needs.
//!
//! A message has 56 bytes and then the private data of the program. All numbers are little-endian.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::header::rdma_conn_param;

/// Version of the format.
const VERSION: u8 = 1;

/// Length of a message without private data, in bytes.
const HEADER_BYTES: usize = 56;

/// Maximum length of a message in bytes.
pub(crate) const MESSAGE_MAX_BYTES: usize = HEADER_BYTES + u8::MAX as usize;

/// Type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MsgKind {
    /// Active end to passive end, first message: connection request.
    Req = 1,
    /// Passive end to active end: reply.
    Rep,
    /// Active end to passive end: ready to use.
    Rtu,
    /// Either end: reject.
    Rej,
    /// Either end: disconnect request.
    Dreq,
    /// Either end: disconnect reply.
    Drep,
}

impl MsgKind {
    fn from_u8(number: u8) -> Option<Self> {
        use MsgKind::*;
        let all = [Req, Rep, Rtu, Rej, Dreq, Drep];
        all.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// Parameters of an end, as in `rdma_conn_param`, and private data of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnParam {
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    /// Number of the QP.
    pub(crate) qpn: u32,
    pub(crate) data: Vec<u8>,
}

impl ConnParam {
    /// Returns the parameters as the remote end sees them: responder and initiator resources are swapped. The private
    /// data is not copied.
    pub(crate) fn as_peer_sees(&self) -> rdma_conn_param {
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
            qp_num: self.qpn,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CmMessage {
    pub(crate) kind: MsgKind,
    /// Reason of a rejection, as numbered by InfiniBand.
    pub(crate) reason: u8,
    pub(crate) param: ConnParam,
    /// Addresses of the active and the passive end, for a request.
    pub(crate) addrs: [SocketAddr; 2],
}

/// Unspecified address.
pub(crate) const UNSPECIFIED_ADDR: SocketAddr =
    SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

impl CmMessage {
    pub(crate) fn new(kind: MsgKind, param: ConnParam) -> Self {
        Self {
            kind,
            reason: 0,
            param,
            addrs: [UNSPECIFIED_ADDR; 2],
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let param = &self.param;
        let mut bytes = vec![
            VERSION,
            self.kind as u8,
            self.reason,
            param.responder_resources,
            param.initiator_depth,
            param.flow_control,
            param.retry_count,
            param.rnr_retry_count,
            param.srq,
            0,
            0,
            0,
        ];
        bytes.extend(param.qpn.to_le_bytes());
        for addr in self.addrs {
            let ip = match addr.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            bytes.extend(ip.octets());
            bytes.extend(addr.port().to_le_bytes());
            bytes.extend([0, 0]);
        }
        bytes.extend(&param.data);
        bytes
    }

    /// Decodes a message. Returns `None` if the bytes are not a valid message.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, data) = bytes.split_at_checked(HEADER_BYTES)?;
        let &[VERSION, kind, reason, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq, ..] =
            header
        else {
            return None;
        };
        let param = ConnParam {
            responder_resources,
            initiator_depth,
            flow_control,
            retry_count,
            rnr_retry_count,
            srq,
            qpn: u32::from_le_bytes(header[12..16].try_into().ok()?),
            data: data.to_vec(),
        };
        Some(Self {
            kind: MsgKind::from_u8(kind)?,
            reason,
            param,
            addrs: [decode_addr(&header[16..36])?, decode_addr(&header[36..])?],
        })
    }
}

/// Decodes an address: 16 bytes of IP address, two of port, and two reserved.
fn decode_addr(bytes: &[u8]) -> Option<SocketAddr> {
    let ip: [u8; 16] = bytes[..16].try_into().ok()?;
    let port = u16::from_le_bytes(bytes[16..18].try_into().ok()?);
    let ip = IpAddr::from(Ipv6Addr::from(ip)).to_canonical();
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(data: &[u8]) -> CmMessage {
        CmMessage {
            kind: MsgKind::Req,
            reason: 3,
            param: ConnParam {
                responder_resources: 1,
                initiator_depth: 2,
                flow_control: 3,
                retry_count: 4,
                rnr_retry_count: 5,
                srq: 6,
                qpn: 0xabcdef,
                data: data.to_vec(),
            },
            addrs: [
                "10.1.2.3:4".parse().unwrap(),
                "[fe80::1]:65535".parse().unwrap(),
            ],
        }
    }

    #[test]
    fn message_encoded_and_decoded_is_unchanged() {
        for len in [0, 1, 255] {
            let message = request(&vec![9; len]);
            let bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_MAX_BYTES);
            assert_eq!(CmMessage::decode(&bytes), Some(message));
        }
    }

    #[test]
    fn malformed_message_is_rejected() {
        let bytes = request(b"").encode();
        assert_eq!(CmMessage::decode(&bytes[..HEADER_BYTES - 1]), None);
        for (at, wrong) in [(0, VERSION + 1), (1, 0), (1, 7)] {
            let mut bytes = bytes.clone();
            bytes[at] = wrong;
            assert_eq!(CmMessage::decode(&bytes), None, "{at}: {wrong}");
        }
    }

    #[test]
    fn param_seen_by_the_peer_swaps_read_depths() {
        let seen = request(b"").param.as_peer_sees();
        assert_eq!((seen.responder_resources, seen.initiator_depth), (2, 1));
    }
}
