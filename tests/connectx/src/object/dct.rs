// SPDX-License-Identifier: GPL-2.0 OR MIT
//! DC targets: where the requests of any DC initiator arrive that knows the access key.

use crate::engine::dc::Initiators;
use crate::layout::{get, get64, size};
use crate::object::qp::Rights;

/// Life cycle of a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DctState {
    /// It takes requests.
    #[default]
    Active = 0,
    /// It finishes what it began.
    Draining = 1,
    /// It does nothing any more.
    Drained = 2,
}

/// A DC target.
#[derive(Clone, Debug)]
pub struct Dct {
    /// Its number.
    pub number: u32,
    /// Its state.
    pub state: DctState,
    /// Its protection domain.
    pub pd: u32,
    /// The key that initiators must know.
    pub access_key: u64,
    /// Where its receive work requests come from.
    pub srqn: u32,
    /// Where its completions go.
    pub cqn: u32,
    /// Its user index in completions.
    pub user_index: u32,
    /// The set of Q counters that count for it.
    pub counters: u32,
    /// Access rights of initiators.
    pub rights: Rights,
    /// RNR timer code for initiators that find no receive.
    pub min_rnr_nak: u8,
    /// The greatest packet, in bytes.
    pub mtu: u32,
    /// Maximum bytes of a message that goes into its completion: 32 or 64, or 0 for none.
    pub scatter_to_cqe: u8,
    /// Requests with a wrong key.
    pub violations: u32,
    /// Initiators that have connected.
    pub initiators: Initiators,
    /// The context as the driver gave it.
    pub context: [u8; size!(dctc)],
}

impl Dct {
    /// A target as the driver describes it.
    pub fn new(number: u32, context: [u8; size!(dctc)]) -> Dct {
        Dct {
            number,
            state: DctState::Active,
            pd: get!(context, dctc, pd),
            access_key: get64!(context, dctc, dc_access_key),
            srqn: get!(context, dctc, srqn_xrqn),
            cqn: get!(context, dctc, cqn),
            user_index: get!(context, dctc, user_index),
            counters: get!(context, dctc, counter_set_id),
            rights: Rights {
                read: get!(context, dctc, rre) != 0,
                write: get!(context, dctc, rwe) != 0,
                atomic: get!(context, dctc, rae) != 0,
            },
            min_rnr_nak: get!(context, dctc, min_rnr_nak) as u8,
            mtu: 128 << get!(context, dctc, mtu),
            scatter_to_cqe: match get!(context, dctc, cs_res) {
                1 => 32,
                2 => 64,
                _ => 0,
            },
            violations: 0,
            initiators: Initiators::default(),
            context,
        }
    }
}
