// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Page faults: what is absent of a memory key is asked of the driver, which brings it in and says so.
//!
//! Who meets an absent page asks, and leaves what it was doing as it was. A send queue and an answer to a
//! READ go on when the driver has answered; a request of a peer is to come again, as if no receive had
//! been posted. This is the device's memory scheme: the driver is told of key and address, and need not
//! know by what work request.

use crate::device::Device;
use crate::object::eq::Event;
use crate::object::mkey::{Absent, Fault};

/// At most so many bytes are asked for at once.
const LIMIT: u64 = 4 << 20;

/// What the driver was asked for.
#[derive(Clone, Debug)]
struct Request {
    token: u64,
    key: u32,
    address: u64,
    /// Queue pairs and DC targets that go on with it.
    waiting: Vec<u32>,
}

/// What was asked for, and not answered so far.
#[derive(Debug, Default)]
pub struct State {
    requests: Vec<Request>,
    last: u64,
    /// Who was answered that there is no memory at this address of a key, and does not know.
    refused: Vec<(u32, u32, u64)>,
}

/// Whether a queue pair or DC target that met a fault is to wait, because the memory is only absent. It gets
/// its turn when the driver has answered.
pub fn waits(device: &mut Device, number: u32, fault: Fault) -> bool {
    let Fault::Absent(absent) = fault else {
        return false;
    };
    let state = &mut device.engine.faults;
    let own = (number, absent.key, absent.address);
    if let Some(at) = state.refused.iter().position(|refused| *refused == own) {
        state.refused.swap_remove(at);
        return false;
    }
    let same =
        |request: &&mut Request| (request.key, request.address) == (absent.key, absent.address);
    if let Some(request) = state.requests.iter_mut().find(same) {
        if !request.waiting.contains(&number) {
            request.waiting.push(number);
        }
        return true;
    }
    ask(device, number, absent)
}

/// Whether a queue pair or DC target waits for the driver.
pub fn is_waiting(device: &Device, number: u32) -> bool {
    let mut requests = device.engine.faults.requests.iter();
    requests.any(|request| request.waiting.contains(&number))
}

/// A queue pair or DC target is reset or gone, and waits for nothing.
pub fn forget(device: &mut Device, number: u32) {
    let state = &mut device.engine.faults;
    state.refused.retain(|(refused, _, _)| *refused != number);
    for request in &mut state.requests {
        request.waiting.retain(|waiting| *waiting != number);
    }
}

/// Asks the driver. Returns whether it listens.
fn ask(device: &mut Device, number: u32, absent: Absent) -> bool {
    let state = &mut device.engine.faults;
    let token = state.last + 1;
    let event = Event::PageFault {
        token,
        key: absent.key,
        address: absent.address,
        length: absent.length.min(LIMIT) as u32,
    };
    let is_heard = device.objects.eqs.iter().any(|(_, eq)| eq.wants(event));
    if !device.firmware.settings.page_faults || !is_heard {
        return false;
    }
    state.last = token;
    state.requests.push(Request {
        token,
        key: absent.key,
        address: absent.address,
        waiting: vec![number],
    });
    device.event(event);
    true
}

/// The driver has answered: the memory is there, or there is none. Returns `None` if it was not asked.
pub fn resume(device: &mut Device, token: u64, is_there: bool) -> Option<()> {
    let state = &mut device.engine.faults;
    let at = state
        .requests
        .iter()
        .position(|request| request.token == token)?;
    let request = state.requests.swap_remove(at);
    if !is_there {
        let waiting = request.waiting.iter();
        let refused = waiting.map(|number| (*number, request.key, request.address));
        state.refused.extend(refused);
    }
    for number in request.waiting {
        device.engine.wake(number);
    }
    Some(())
}
