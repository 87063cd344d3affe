//! What the guest is expected to say that nobody need be woken for.
//!
//! An answer to a request or to an end changes nothing by itself, as a rule, and the guest need not kick for
//! it: it is taken together with the next packet. That takes a number, so what this guest says is
//! learned. Linux says two things to each: it accepts, and tells its credit when its program
//! has read; it resets, and resets again when its program closes the socket.

use super::packet::op;

/// Requests and ends whose answers are counted at a time.
const MAX_AWAITED: usize = 8;
/// How often a guest that has often said less than expected must say the second thing.
const MAX_NEEDED: u8 = 64;

/// A connection by host port and guest port.
type Ports = (u32, u32);

/// What a guest was told that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// A request.
    Request,
    /// The end of both directions.
    End,
}

/// Whether a guest says a second thing.
#[derive(Debug)]
struct Habit {
    /// How often it has said it.
    seen: u8,
    /// How often it must have before that is relied on: the more, the more often it then did not.
    needed: u8,
}

/// What is still to come about one connection.
#[derive(Debug)]
struct Answers {
    ports: Ports,
    told: Told,
    /// The first has come.
    answered: bool,
}

/// Everything that is still to come.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    list: Vec<Answers>,
    tells_credit: Habit,
    resets_twice: Habit,
}

impl Default for Habit {
    fn default() -> Self {
        Habit { seen: 0, needed: 1 }
    }
}

impl Habit {
    fn holds(&self) -> bool {
        self.seen >= self.needed
    }

    fn was_seen(&mut self) {
        self.seen = self.seen.saturating_add(1);
    }

    fn was_missed(&mut self) {
        if self.holds() {
            self.needed = (2 * self.needed).min(MAX_NEEDED);
        }
        self.seen = 0;
    }
}

impl Awaited {
    /// The guest was told something about a connection.
    pub(super) fn told(&mut self, ports: Ports, told: Told) {
        self.list.retain(|answers| answers.ports != ports);
        if self.list.len() < MAX_AWAITED {
            self.list.push(Answers {
                ports,
                told,
                answered: false,
            });
        }
    }

    /// It said something about a connection that the host knows; `early` if it had sent no data.
    pub(super) fn said(&mut self, ports: Ports, op: u16, early: bool) {
        if op == op::CREDIT_UPDATE && early {
            self.tells_credit.was_seen();
        }
        let credit = self.tells_credit.holds();
        let twice = self.resets_twice.holds();
        self.list.retain_mut(|answers| {
            if answers.ports != ports {
                return true;
            }
            let first = !std::mem::replace(&mut answers.answered, true);
            match (answers.told, op) {
                (Told::Request, op::RESPONSE) => first && credit && early,
                (Told::End, op::RST) => first && twice,
                // Data that was on its way: the answer is still to come.
                (Told::End, _) => {
                    answers.answered = !first;
                    true
                }
                (Told::Request, _) => false,
            }
        });
    }

    /// It reset a connection that the host does not know (any more).
    pub(super) fn reset_unknown(&mut self, ports: Ports) {
        self.resets_twice.was_seen();
        self.list.retain(|answers| answers.ports != ports);
    }

    /// A connection is over: of an end that was answered, only the second reset can still come.
    pub(super) fn over(&mut self, ports: Ports) {
        self.list.retain(|answers| {
            answers.ports != ports || answers.told == Told::End && answers.answered
        });
    }

    /// It said less than expected, or not in time. From now on every packet is a reason to look, until
    /// it has shown again what it does.
    pub(super) fn disappointed(&mut self) {
        self.list.clear();
        self.tells_credit.was_missed();
        self.resets_twice.was_missed();
    }

    /// How many packets should come. None if something is needed at once, which `is_needed` says of
    /// the connections that there are.
    pub(super) fn count(&self, is_needed: impl Fn(Ports) -> bool) -> u16 {
        let mut count = 0;
        for answers in &self.list {
            // Of an end that was answered, nothing is left to need the rest.
            let is_over = answers.told == Told::End && answers.answered;
            if !is_over && is_needed(answers.ports) {
                return 0;
            }
            let habit = match answers.told {
                Told::Request => &self.tells_credit,
                Told::End => &self.resets_twice,
            };
            count += u16::from(!answers.answered) + u16::from(habit.holds());
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Ports = (1 << 30, 1025);
    const B: Ports = (1 + (1 << 30), 1025);

    fn count(awaited: &Awaited) -> u16 {
        awaited.count(|_| false)
    }

    /// A guest that has shown what Linux does.
    fn linux() -> Awaited {
        let mut awaited = Awaited::default();
        awaited.said(A, op::CREDIT_UPDATE, true);
        awaited.reset_unknown(A);
        awaited
    }

    #[test]
    fn each_answer_is_one_less_to_come_in_whatever_order() {
        let mut awaited = linux();
        awaited.told(A, Told::End);
        awaited.told(B, Told::Request);
        assert_eq!(count(&awaited), 4);
        awaited.said(A, op::RST, false);
        awaited.over(A);
        assert_eq!(count(&awaited), 3);
        awaited.said(B, op::RESPONSE, true);
        assert_eq!(count(&awaited), 2);
        awaited.reset_unknown(A);
        assert_eq!(count(&awaited), 1);
        awaited.said(B, op::CREDIT_UPDATE, true);
        assert_eq!(count(&awaited), 0);
    }

    #[test]
    fn what_a_connection_can_no_longer_say_is_not_waited_for() {
        let mut awaited = linux();
        awaited.told(A, Told::Request);
        awaited.said(A, op::RW, true);
        assert_eq!(count(&awaited), 0);
        awaited.told(A, Told::Request);
        awaited.said(A, op::RST, true);
        awaited.over(A);
        assert_eq!(count(&awaited), 0);
        awaited.told(A, Told::End);
        awaited.said(A, op::RW, false);
        assert_eq!(count(&awaited), 2);
        awaited.over(A);
        assert_eq!(count(&awaited), 0);
        for port in 0..100 {
            awaited.told((port, 1), Told::Request);
        }
        assert_eq!(count(&awaited), 16);
        assert_eq!(awaited.count(|(port, _)| port == 5), 0);
    }

    #[test]
    fn who_says_now_one_thing_and_now_two_is_relied_on_ever_less() {
        let mut awaited = Awaited::default();
        let mut missed = 0;
        for _ in 0..1000 {
            awaited.told(A, Told::End);
            awaited.said(A, op::RST, false);
            awaited.over(A);
            if count(&awaited) == 1 {
                missed += 1;
                awaited.disappointed();
            }
            awaited.told(B, Told::End);
            awaited.said(B, op::RST, false);
            awaited.over(B);
            awaited.reset_unknown(B);
        }
        assert!((1..=20).contains(&missed), "{missed}");
    }
}
