// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Objects by number, as firmware hands the numbers out. A freed number comes back as late as possible,
//! so that a stale one is noticed.

use std::collections::VecDeque;

/// Objects of one kind.
#[derive(Debug)]
pub struct Table<T> {
    first: u32,
    limit: usize,
    slots: Vec<Option<Box<T>>>,
    free: VecDeque<u32>,
}

impl<T> Table<T> {
    /// At most `limit` objects, numbered from `first`.
    pub fn new(first: u32, limit: usize) -> Self {
        Table {
            first,
            limit,
            slots: Vec::new(),
            free: VecDeque::new(),
        }
    }

    /// Takes an object that is made with its number; `None` if there are too many.
    pub fn insert_with(&mut self, make: impl FnOnce(u32) -> T) -> Option<u32> {
        let number = if self.slots.len() < self.limit {
            self.slots.push(None);
            self.first + self.slots.len() as u32 - 1
        } else {
            self.free.pop_front()?
        };
        let slot = self.slot(number)?;
        self.slots[slot] = Some(Box::new(make(number)));
        Some(number)
    }

    /// Takes an object; `None` if there are too many.
    pub fn insert(&mut self, object: T) -> Option<u32> {
        self.insert_with(|_| object)
    }

    /// The object with this number.
    pub fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.slot(number)?)?.as_deref()
    }

    /// The object with this number.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.as_deref_mut()
    }

    /// Removes the object with this number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number)?;
        let object = self.slots.get_mut(slot)?.take()?;
        self.free.push_back(number);
        Some(*object)
    }

    /// Takes the object with this number out for a while, to be put back.
    pub fn take(&mut self, number: u32) -> Option<Box<T>> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.take()
    }

    /// Puts an object back that was taken out.
    pub fn put_back(&mut self, number: u32, object: Box<T>) {
        if let Some(slot) = self.slot(number) {
            self.slots[slot] = Some(object);
        }
    }

    /// All objects with their numbers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let numbered = (self.first..).zip(&self.slots);
        numbered.filter_map(|(number, slot)| Some((number, slot.as_deref()?)))
    }

    /// All objects with their numbers, in order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        let numbered = (self.first..).zip(&mut self.slots);
        numbered.filter_map(|(number, slot)| Some((number, slot.as_deref_mut()?)))
    }

    /// Returns the number of objects.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns `true` if there is no object.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn slot(&self, number: u32) -> Option<usize> {
        number.checked_sub(self.first).map(|slot| slot as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_number_is_reused_last() {
        let mut table = Table::new(5, 3);
        assert_eq!([table.insert('a'), table.insert('b')], [Some(5), Some(6)]);
        assert_eq!(table.remove(5), Some('a'));
        assert_eq!(table.get(5), None);
        assert_eq!([table.insert('c'), table.insert('d')], [Some(7), Some(5)]);
        assert_eq!(table.insert('e'), None);
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn unallocated_number_finds_nothing() {
        let mut table = Table::new(5, 3);
        table.insert(());
        for number in [0, 4, 6, u32::MAX] {
            assert_eq!(table.get(number), None);
            assert_eq!(table.remove(number), None);
        }
    }
}
